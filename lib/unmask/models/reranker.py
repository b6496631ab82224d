"""`Reranker`: a causal language model that reads a query and a document together and answers "yes" or "no"
(Qwen3-Embedding, section 2).

Legend: B prompts read together · L tokens · D dimensions · M documents.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from unmask.data.tokens import TokenSequence, Truncation, encode
from unmask.models import backbone, checkpoint
from unmask.models.arguments import as_list, check_counts, check_texts
from unmask.models.embedder import Embedder, Reading, Unit

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

    >>> path = "artifacts/reranker/model"
    >>> reranker = Reranker.from_pretrained(path)                    # doctest: +SKIP
    >>> reranker.rerank("How do I open a file?", documents, top=10)  # doctest: +SKIP

    Prompts of similar length share a forward pass.

    Args:
        instruction: what documents are wanted for, in a sentence.
        about: where the model is from, saved with it.
        options: `max_length` (tokens of a prompt at most; the document is cut first, then the query, and
            nothing else), `device` (one), `mixed_precision` and `token_budget` of `Embedder`.
    Raises: ValueError for a model that is not causal, a `max_length` that leaves query and document no room,
        and bf16 as for `Embedder`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        instruction: str = INSTRUCTION,
        about: Mapping[str, Any] | None = None,
        **options,
    ):
        if not getattr(model.config, "is_causal", True):
            raise ValueError("the model is bidirectional (is_causal is false): a reranker needs a causal one")
        self.model, self.tokenizer, self.instruction = model.eval(), tokenizer, instruction
        self.about = dict(about or {})
        self.reader = Embedder(model.base_model, tokenizer, **options)
        self.yes, self.no = answers(tokenizer.backend_tokenizer)
        self._taken(around_query(instruction))

    @classmethod
    def from_pretrained(cls, path: str | Path, **options) -> "Reranker":
        """Loads a causal language model, ours or a released Qwen3-Reranker, by directory or Hub name.

        Options as for the constructor.

        Raises: ValueError if the directory holds no checkpoint.
        """
        folder = checkpoint.folder_of(path)
        about = {key: value for key, value in backbone.facts(folder).items() if key != "fingerprint"}
        known = {key: about.pop(key) for key in ("instruction", "max_length") if key in about}
        options = known | {"about": about} | options
        return cls(backbone.load(folder, head=True), backbone.load_tokenizer(folder), **options)

    def save_pretrained(self, path: str | Path) -> Path:
        """Writes a directory that `from_pretrained` and AutoModelForCausalLM load."""
        settings = {"instruction": self.instruction, "max_length": self.reader.max_length}
        facts = {"stage": "reranker"} | self.about | settings
        return backbone.save(self.model, self.tokenizer, Path(path), **facts)

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
        check_counts(top=top)
        odds_M = self.log_odds(query, documents, **options)
        score_M = torch.from_numpy(odds_M).sigmoid().tolist()
        return [(int(i), score_M[i]) for i in np.argsort(-odds_M, kind="stable")[:top]]

    def log_odds(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        query_length: int | None = None,
        document_length: int | None = None,
    ) -> np.ndarray:
        """Logit of "yes" minus that of "no" for each document: it orders them where scores round to 1.

        Args:
            instruction: instead of the reranker's own.
            query_length, document_length: tokens at most, if `max_length` leaves so many.
        Returns: float64, (M,).
        Control tokens that query and documents spell out are broken up, in training, too: see `Truncation`.

        Raises: TypeError for what is no string, ValueError for a lone surrogate (half a character) and if the
            model returns NaN or infinity, all of them naming the document. ValueError for an instruction
            beside which no query has room.
        """
        documents = as_list(documents, "score(query, [document])")
        names = ["the query", *(f"document {number} of {len(documents)}" for number in range(len(documents)))]
        check_texts([query, *documents], names.__getitem__, empty=True)
        check_counts(query_length=query_length, document_length=document_length)
        longest = self.reader.max_length
        around = around_query(self.instruction if instruction is None else instruction)
        head, tail = self._taken(around)
        (start_L,) = self._ids([query], min(head + (query_length or longest), longest - tail - 1), around)
        limit = min(tail + (document_length or longest), longest - len(start_L))
        prompts = (np.concatenate([start_L, end_L]) for end_L in self._ids(documents, limit, AROUND_DOCUMENT))
        units = (Unit(TokenSequence(ids), np.array([number])) for number, ids in enumerate(prompts))
        last_MD = torch.from_numpy(self.reader.rows(Reading(units, "last", names[1:].__getitem__))[1])
        yes_D, no_D = self.model.get_output_embeddings().weight[[self.yes, self.no]].double().cpu()
        return (last_MD.double() @ (yes_D - no_D)).numpy(force=True)

    def _ids(self, texts: list[str], limit: int, around: tuple[str, str]) -> list[np.ndarray]:
        truncation = Truncation(limit, *around, escape_special_tokens=True)
        return list(encode(self.tokenizer.backend_tokenizer, texts, np.int32, truncation))

    def _taken(self, around: tuple[str, str]) -> list[int]:
        """Tokens around the query and around the document.

        Raises: ValueError if they leave query and document no token each.
        """
        counts = [taken(self.tokenizer.backend_tokenizer, one) for one in (around, AROUND_DOCUMENT)]
        if (longest := self.reader.max_length) < (least := sum(counts) + 2):
            prompt = f"the prompt has {least - 2} tokens without query and document"
            raise ValueError(f"max_length must be at least {least}, got {longest}: {prompt}")
        return counts


def around_query(instruction: str) -> tuple[str, str]:
    """What stands before and after a query. With a document and AROUND_DOCUMENT behind it, it is a prompt.

    No token reaches from one half to the other, so both can be tokenised by themselves.
    """
    return HEAD.format(instruction=instruction), "\n<Document>:"


def taken(tokenizer: Tokenizer, around: tuple[str, str]) -> int:
    """Tokens of what stands around a text."""
    return len(next(encode(tokenizer, [""], np.int32, Truncation(None, *around))))


def answers(tokenizer: Tokenizer) -> tuple[int, int]:
    """The tokens that say "yes" and "no": the first of each word, which may be a part of it."""
    yes, no = encode(tokenizer, ["yes", "no"], np.int32)
    if yes[0] == no[0]:
        raise ValueError('the tokenizer begins "yes" and "no" with the same token: take another checkpoint')
    return int(yes[0]), int(no[0])


def padded(sequences: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Sequences side by side, and the place of the last token of each: tokens_BL, last_B.

    Padding stands behind, where the tokens of a causal model do not see it: it needs no attention mask.
    """
    tokens_BL = pad_sequence([torch.from_numpy(ids.astype(np.int64)) for ids in sequences], batch_first=True)
    return tokens_BL, torch.tensor([len(ids) - 1 for ids in sequences])
