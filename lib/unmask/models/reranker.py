"""`Reranker`: a causal language model that reads a query and a document together and answers "yes" or "no"
(Qwen3-Embedding, section 2).

Legend: B prompts read together · L tokens · D dimensions · M documents.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from unmask.data.tokens import encode
from unmask.models import backbone
from unmask.models.attention import fast_attention
from unmask.models.encoding import micro_batches
from unmask.models.interchange import write_json
from unmask.store import new_directory

# Of the released models.
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The chat template of the released models, with an empty thought before the answer.
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
HEAD = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n<Instruct>: {{instruction}}\n<Query>: "
TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
AROUND_DOCUMENT = (" ", TAIL)


class Reranker:
    """A checkpoint, ready to say how well documents answer a query.

    >>> path = "artifacts/cpu/11_qwen3_embedding/reranker/model"
    >>> reranker = Reranker.from_pretrained(path)                    # doctest: +SKIP
    >>> reranker.rerank("How do I open a file?", documents, top=10)  # doctest: +SKIP

    What comes before a document is read once for all documents of a query, and its keys and values are kept
    for them; documents of similar length share a forward pass.

    Args:
        instruction: what documents are wanted for, in a sentence.
        max_length: tokens of a prompt at most; the document is cut first, then the query, and nothing else.
            Default: the model's positions.
        device: default: the first CUDA device, or else the CPU.
        mixed_precision: bf16 autocast. Default: on a GPU that has it, not on a CPU.
        token_budget: tokens of the prompts of one forward pass, padding included; bounds memory. Default:
            1,024 on a CPU, otherwise 32,768.
    Raises: ValueError for a model that is not causal, and a `max_length` that leaves query and document no
        room.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        instruction: str = INSTRUCTION,
        max_length: int | None = None,
        device: str | torch.device | None = None,
        mixed_precision: bool | None = None,
        token_budget: int | None = None,
    ):
        if not getattr(model.config, "is_causal", True):
            raise ValueError(
                "the model is bidirectional (is_causal is false in its configuration), but a reranker has to "
                "predict the next token: give a causal checkpoint, that of the autoregressive backbone say"
            )
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.model = model.to(self.device).eval()
        self.tokenizer = tokenizer
        self.instruction = instruction
        window = int(model.config.max_position_embeddings)
        self.max_length = window if max_length is None else min(max_length, window)
        on_gpu = self.device.type == "cuda"
        if mixed_precision is None:
            mixed_precision = on_gpu and backbone.computes_in_bf16("bf16")
        self.mixed_precision = mixed_precision
        self.token_budget = token_budget or (32_768 if on_gpu else 1_024)
        self.yes, self.no = answers(tokenizer.backend_tokenizer)
        self._limits(instruction, None, None)

    @classmethod
    def from_pretrained(cls, path: str | Path, **options) -> Reranker:
        """Loads a causal language model, ours or a released Qwen3-Reranker, by directory or Hub name.

        Options as for the constructor.

        Raises: ValueError if the directory holds no checkpoint.
        """
        known = {key: value for key, value in backbone.facts(path).items() if key == "instruction"}
        return cls(backbone.load(path, head=True), backbone.load_tokenizer(path), **{**known, **options})

    def save_pretrained(self, path: str | Path) -> Path:
        """Writes a directory that `from_pretrained`, AutoModelForCausalLM and sentence-transformers load.

        `CrossEncoder(path).predict([(query, document)])` returns the same scores, without remote code; its
        `prompt` is another instruction.
        """
        path = Path(path)
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.chat_template = chat_template(self.instruction)
        tokenizer.model_max_length = self.max_length
        kinds = ("base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore")
        files = {
            "modules.json": [
                {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.{kind}"}
                for i, (kind, place) in enumerate(zip(kinds, ("", "1_LogitScore")))
            ],
            "sentence_bert_config.json": {
                "transformer_task": "text-generation",
                "modality_config": {
                    "text": {"method": "forward", "method_output_name": "logits"},
                    "message": {"method": "forward", "method_output_name": "logits", "format": "flat"},
                },
                "module_output_name": "causal_logits",
            },
            "1_LogitScore/config.json": {"true_token_id": self.yes, "false_token_id": self.no},
            "config_sentence_transformers.json": {
                "model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.Sigmoid",
            },
        }  # fmt: skip
        with new_directory(path) as folder:
            backbone.write(self.model, tokenizer, folder, stage="reranker", instruction=self.instruction)
            write_json(folder, files)
        return path

    def score(self, query: str, documents: Sequence[str], **options) -> np.ndarray:
        """The probability of "yes" against "no" for each document, as the next token after the prompt.

            score = e^yes / (e^yes + e^no) = σ(yes − no), of the two tokens' logits

        Options, errors and the order of rows are those of `log_odds`.

        Returns: float64, (M,), in 0…1.
        Source: Qwen3-Embedding, section 2, and the released model's code.
        """
        return torch.from_numpy(self.log_odds(query, documents, **options)).sigmoid().numpy()

    def rerank(
        self, query: str, documents: Sequence[str], top: int | None = None, **options
    ) -> list[tuple[int, float]]:
        """The documents' numbers and scores, best first; equal ones stay in the order in which they came.

        Args:
            top: how many to return; default: all.
            options: of `log_odds`.
        """
        odds_M = self.log_odds(query, documents, **options)
        score_M = torch.from_numpy(odds_M).sigmoid().tolist()
        return [(int(i), score_M[i]) for i in np.argsort(-odds_M, kind="stable")[:top]]

    def log_odds(
        self, query: str, documents: Sequence[str], *, instruction: str | None = None,
        query_length: int | None = None, document_length: int | None = None, progress: bool = False,
    ) -> np.ndarray:  # fmt: skip
        """Logit of "yes" minus that of "no" for each document: it orders them where scores round to 1.

        Args:
            instruction: instead of the reranker's own.
            query_length, document_length: tokens at most, if `max_length` leaves so many.
        Returns: float64, (M,).
        Raises: ValueError if the model returns NaN or infinity, naming the document.
        """
        if isinstance(documents, str):
            raise ValueError("expected a list of documents, got one string: write score(query, [document])")
        instruction = instruction or self.instruction
        backend = self.tokenizer.backend_tokenizer
        limit, limit_document = self._limits(instruction, query_length, document_length)
        (start_L,) = encode(backend, [query], np.int32, limit, around_query(instruction))
        limit_document = min(limit_document, self.max_length - len(start_L))
        ends = list(encode(backend, documents, np.int32, limit_document, AROUND_DOCUMENT))
        groups = micro_batches([len(start_L) + len(end_L) for end_L in ends], self.token_budget)
        odds_M = np.empty(len(documents))
        with (
            torch.inference_mode(),
            fast_attention(),
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.mixed_precision),
            tqdm(total=len(documents), unit="document", leave=False, disable=not progress) as bar,
        ):
            shared = self._read(torch.from_numpy(start_L)[None])
            for group in groups:
                odds_M[group] = self._odds(shared, [ends[i] for i in group])
                bar.update(len(group))
        if not np.isfinite(odds_M).all():
            number = np.flatnonzero(~np.isfinite(odds_M))[0]
            raise ValueError(
                f"Document {number} of {len(documents)}: the model returns NaN or infinity for it"
            )
        return odds_M

    def _limits(
        self, instruction: str, query_length: int | None, document_length: int | None
    ) -> tuple[int, int]:
        """Tokens of a query and of a document at most, with what stands around them."""
        backend = self.tokenizer.backend_tokenizer
        query, document = taken(backend, around_query(instruction)), taken(backend, AROUND_DOCUMENT)
        if self.max_length < query + document + 2:
            raise ValueError(
                f"max_length must be at least {query + document + 2}, got {self.max_length}: the prompt has "
                f"{query + document} tokens without query and document"
            )
        longest = self.max_length - document - 1
        return (
            longest if query_length is None else min(query + query_length, longest),
            self.max_length if document_length is None else document + document_length,
        )

    def _read(self, tokens_1L: Tensor) -> DynamicCache:
        """The keys and values of what all documents of a query share."""
        return self.model.base_model(tokens_1L.to(self.device), use_cache=True).past_key_values

    def _odds(self, shared: DynamicCache, ends: list[np.ndarray]) -> np.ndarray:
        tokens_BL, last_B = padded(ends)
        size = len(ends)
        kept = DynamicCache(
            [(key.expand(size, -1, -1, -1), value.expand(size, -1, -1, -1)) for key, value, *_ in shared]
        )
        hidden_BLD = self.model.base_model(
            tokens_BL.to(self.device), past_key_values=kept, use_cache=True
        ).last_hidden_state
        rows_BD = hidden_BLD[torch.arange(size), last_B].float()
        yes_D, no_D = self.model.get_output_embeddings().weight[[self.yes, self.no]].float()
        with torch.autocast(self.device.type, enabled=False):
            return (rows_BD @ (yes_D - no_D)).double().cpu().numpy()


def around_query(instruction: str) -> tuple[str, str]:
    """What stands before and after a query. With a document and AROUND_DOCUMENT behind it, it is a prompt.

    No token reaches from one half to the other, so both can be tokenised, and read, by themselves.
    """
    return HEAD.format(instruction=instruction), "\n<Document>:"


def chat_template(instruction: str) -> str:
    """The prompt in Jinja, as tokenizers keep it: roles "query", "document" and, for another instruction,
    "system"."""
    before, after = HEAD.split("{instruction}")
    start, end = AROUND_DOCUMENT
    parts = [before, "own.instruction", after, "own.query", around_query("")[1] + start, "own.document", end]
    texts = [part if part.startswith("own.") else json.dumps(part) for part in parts]
    return (
        f"{{%- set own = namespace(instruction={json.dumps(instruction)}, query='', document='') -%}}\n"
        "{%- for message in messages -%}\n"
        "{%- if message.role == 'system' -%}{%- set own.instruction = message.content -%}\n"
        "{%- elif message.role == 'query' -%}{%- set own.query = message.content -%}\n"
        "{%- else -%}{%- set own.document = message.content -%}{%- endif -%}\n"
        "{%- endfor -%}\n"
        f"{{{{- {' ~ '.join(texts)} -}}}}"
    )


def taken(tokenizer: Tokenizer, around: tuple[str, str]) -> int:
    """Tokens of what stands around a text."""
    return len(next(encode(tokenizer, [""], np.int32, around=around)))


def answers(tokenizer: Tokenizer) -> tuple[int, int]:
    """The tokens that say "yes" and "no": the first of each word, which in a small vocabulary may be a part.

    Raises: ValueError if both begin with the same token.
    """
    yes, no = (int(ids[0]) for ids in encode(tokenizer, ["yes", "no"], np.int32))
    if yes == no:
        raise ValueError(
            f"'yes' and 'no' begin with the same token, {tokenizer.id_to_token(yes)!r}, so the answers "
            "cannot be told apart: use a tokenizer with a larger vocabulary"
        )
    return yes, no


def padded(sequences: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Sequences side by side, and the place of the last token of each: tokens_BL, last_B.

    Padding stands behind, where the tokens of a causal model do not see it: it needs no attention mask.
    """
    tokens_BL = pad_sequence([torch.from_numpy(ids.astype(np.int64)) for ids in sequences], batch_first=True)
    return tokens_BL, torch.tensor([len(ids) - 1 for ids in sequences])
