"""The prompt of Qwen3-Reranker as tokens, the same in training and in inference.

Shape suffixes: B prompts · L tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from unmask.data.tokens import encode

# The chat template of the released models, with an empty thought before the answer.
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
HEAD = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n<Instruct>: {{instruction}}\n<Query>: "
TAIL = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
AROUND_DOCUMENT = (" ", TAIL)


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
