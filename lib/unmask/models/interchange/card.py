"""The model card of a saved embedder: what the checkpoint itself says, and how to load it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unmask.models.interchange.loading import OPTIONS
from unmask.models.quantize import bytes_per_embedding, documents_per_megabyte

if TYPE_CHECKING:
    from unmask.models.embedder import Embedder

CARD = """---
library_name: sentence-transformers
pipeline_tag: feature-extraction
tags:
- sentence-transformers
- feature-extraction
- sentence-similarity
- unmask
---

# {name}

A text embedding model: {architecture} with {attention} attention, {parameters:.1f} million parameters,
{pooling} pooling, {dimensions} dimensions, at most {length} tokens per text. Compare embeddings by cosine.
{prompts}
## Use

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")  # no remote code
vectors = model.encode(["How do I open a file?"])  # float32, not quantised
```

INT8 codes, and chunks embedded in the light of their document, come from Unmask:

```python
from unmask import Embedder

embedder = Embedder.from_pretrained("{name}")
codes = embedder.encode(["How do I open a file?"])
chunks = embedder.encode_documents([["first chunk of a document", "second chunk"]])
```

or from sentence-transformers, with `unmask.models.interchange.Int8Quantizer` appended to the model.

| precision | bytes per embedding | documents per MB |
|---|---|---|
{precisions}

## Origin

{origin}
"""
PROMPT = """
Put this before every {name}, adapted to your task; `prompt_name="{name}"` of sentence-transformers does it:

```
{text}
```
"""
POOLING = {"mean": "mean", "last": "last-token"}


def model_card(embedder: Embedder, facts: dict[str, Any], name: str) -> str:
    """Text of README.md, with the metadata that the Hub reads at its top.

    Args:
        facts: of unmask.json: the stage that made the checkpoint, and its settings.
        name: of the model, as it is to be loaded.
    """
    model, config = embedder.model, embedder.model.config
    size = config.hidden_size
    precisions = ["float32", "int8", *(["binary"] if size % 8 == 0 else [])]
    rows = [
        f"| {p} | {bytes_per_embedding(size, p):,} | {documents_per_megabyte(size, p):,} |"
        for p in precisions
    ]
    # Where the configuration is silent, the attention layers decide.
    causal = getattr(config, "is_causal", any(getattr(m, "is_causal", False) for m in model.modules()))
    origin = [f"- {key}: {value}" for key, value in facts.items() if key not in (*OPTIONS, "prompts")]
    prompts = [PROMPT.format(name=n, text=text) for n, text in facts.get("prompts", {}).items() if text]
    return CARD.format(
        name=name,
        architecture=type(model).__name__,
        parameters=model.num_parameters() / 1e6,
        attention="causal" if causal else "bidirectional",
        pooling=POOLING[embedder.pooling],
        dimensions=f"{size:,}",
        length=f"{embedder.max_length:,}",
        prompts="".join(prompts),
        precisions="\n".join(rows),
        origin="\n".join(origin) or "Not recorded.",
    )
