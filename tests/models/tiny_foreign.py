"""Tiny checkpoints in the layouts of others: sentence-transformers', and the released pplx-embed and
Qwen3-Embedding ones."""

import json
import string
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, BertTokenizer, PreTrainedTokenizerFast

import tiny

LETTERS = [*string.ascii_lowercase, *("##" + letter for letter in string.ascii_lowercase)]


def bert(folder: Path) -> Path:
    """A BERT whose tokenizer puts [CLS] and [SEP] around a text."""
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)}, model_max_length=64)
    shape = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=64,
    )  # fmt: skip
    BertModel(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def causal_qwen3(folder: Path) -> Path:
    """A causal Qwen3 whose tokenizer adds <|endoftext|> and pads on the left, as Qwen3-Embedding's."""
    tokenizer = tiny.tokenizer()
    plain = tokenizer.backend_tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    end = tokenizer.eos_token
    plain.post_processor = TemplateProcessing(
        single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, tokenizer.eos_token_id)]
    )
    tiny.model(bidirectional=False).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token=end, pad_token=end, padding_side="left"
    ).save_pretrained(folder)
    return folder


def qwen3_embedding(folder: Path) -> Path:
    """A tiny checkpoint with the files of the released Qwen3-Embedding, where the final token is not the
    eos_token, and sentence_bert_config.json is missing."""
    causal_qwen3(folder)
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    prefix = "sentence_transformers.models"
    modes = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken")
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    files = {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"{prefix}.{kind}"}
            for i, (kind, path) in enumerate(kinds.items())
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "include_prompt": True}
        | {f"pooling_mode_{mode}": mode == "lasttoken" for mode in modes},
        "config_sentence_transformers.json": {
            "prompts": {"query": f"Instruct: {instruction}\nQuery:", "document": ""},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
        "tokenizer_config.json": json.loads((folder / "tokenizer_config.json").read_text())
        | {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "model_max_length": 131072},
        "config.json": json.loads((folder / "config.json").read_text())
        | {"architectures": ["Qwen3ForCausalLM"], "use_cache": True},
    }
    (folder / "1_Pooling").mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def sentence_transformers(
    source: Path, folder: Path, pooling: str = "mean", *, normalize: bool = False, **more
):
    """A sentence-transformers directory around a checkpoint; `more` are options of SentenceTransformer."""
    modules = [Transformer(str(source)), Pooling(32, pooling), *([Normalize()] if normalize else [])]
    SentenceTransformer(modules=modules, device="cpu", **more).save(str(folder), create_model_card=False)
    return folder


def released(folder: Path, *, contextual: bool = False) -> Path:
    """A tiny checkpoint laid out as the released pplx-embed ones, in shards, with code that must not run."""
    model = tiny.model()
    model.save_pretrained(folder, max_shard_size="50KB")
    tiny.tokenizer().save_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    kind = "PPLXQwen3ContextualModel" if contextual else "PPLXQwen3Model"
    own = ("is_causal", "mask_token_id", "rope_parameters", "dtype", "transformers_version")
    config = {key: value for key, value in model.config.to_dict().items() if key not in own}
    config |= {
        "model_type": "bidirectional_pplx_qwen3",
        "architectures": [kind],
        "auto_map": {"AutoConfig": "configuration.PPLXQwen3Config", "AutoModel": f"modeling.{kind}"},
        "use_bidirectional_attention": True,
        "rope_theta": 1_000_000,
        "rope_scaling": None,
        "torch_dtype": "float32",
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    code = "raise RuntimeError('code of a checkpoint was run')\n"
    for name in ("configuration.py", "modeling.py", "st_quantize.py"):
        (folder / name).write_text(code)
    if not contextual:
        types = ["sentence_transformers.models.Transformer", "sentence_transformers.models.Pooling"]
        modules = zip((*types, "st_quantize.FlexibleQuantizer"), ("", "1_Pooling", "2_Quantizer"))
        listed = [{"idx": i, "name": str(i), "path": p, "type": t} for i, (t, p) in enumerate(modules)]
        (folder / "modules.json").write_text(json.dumps(listed))
    return folder
