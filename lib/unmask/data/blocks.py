"""Pretraining text as blocks of equal length: tokenised once, mapped into memory, addressed by number.

The texts of a source lie in one file of tokens, one after the other, with `<|endoftext|>` after each. Block
i of length L is the slice [iL, (i + 1)L), so one file serves every length. Blocks are not isolated from one
another where two texts meet, as in the paper's packing to 4,096 tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unmask.data import formats, prepare, reading, tokens
from unmask.data.batches import permuted
from unmask.data.prepare import Column, Prepared
from unmask.data.reading import Unit, units
from unmask.data.registry import Source
from unmask.data.tables import identity
from unmask.data.tokens import StoredTokenizer, encode
from unmask.store import artifacts_root, fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNIT_BYTES = 1 << 20  # of text: half a second of work, so that workers end together
_CODE = (__file__, formats.__file__, reading.__file__, tokens.__file__)  # what the tokens depend on


@dataclass(frozen=True)
class Part:
    """The blocks of one source: `count` of them, out of the first `distinct` blocks of its tokens."""

    source: Source
    prepared: Prepared
    tokens: np.ndarray
    count: int
    distinct: int


class Blocks:
    """Blocks of text in the sources' shares, like an integer array (N, L) that no memory holds.

    Blocks of a source stand together, in a random order; a source with too few of them repeats, in a new
    order each time.

    Args:
        parts: the sources' blocks.
        length: tokens per block.
        seed: of the order.
    """

    def __init__(self, parts: Sequence[Part], length: int, seed: int):
        self.parts, self._seed = tuple(parts), seed
        self._ends = np.cumsum([part.count for part in parts])
        self.shape = (int(self._ends[-1]), length)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """The blocks of these numbers: (B, L), in the type of the tokens."""
        rows = np.asarray(rows, np.int64)
        length = self.shape[1]
        blocks_BL = np.empty((len(rows), length), self.parts[0].tokens.dtype)
        owner = np.searchsorted(self._ends, rows, side="right")
        for number in np.unique(owner):
            part, own = self.parts[number], np.flatnonzero(owner == number)
            epochs, places = np.divmod(rows[own] - (self._ends[number] - part.count), part.distinct)
            for epoch in np.unique(epochs):
                now = epochs == epoch
                order = permuted(places[now], part.distinct, [self._seed, int(number), int(epoch)])
                for row, block in zip(own[now], order.tolist(), strict=True):
                    blocks_BL[row] = part.tokens[block * length : (block + 1) * length]
        return blocks_BL

    def report(self) -> list[dict[str, Any]]:
        """For each source: its share of the blocks in percent, how often it is repeated, what is in its
        texts and what was left out of them."""
        return [
            {
                "source": part.source.name,
                "language": part.source.language,
                "share": 100 * part.count / len(self),
                "blocks": part.count,
                "epochs": part.count / part.distinct if part.distinct else 0.0,
                "unused tokens": len(part.tokens) - part.distinct * self.shape[1],
                **part.prepared.counters,
            }
            for part in self.parts
        ]


def open_blocks(
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    wanted: int,
    seed: int,
    workers: int | None = None,
) -> Blocks:
    """Blocks of the sources' training texts, tokenised on first use and no further than is wanted.

    Where the sources have shares, there are exactly `wanted` blocks, divided by largest remainder. Where they
    have none, every source is tokenised to its end and gives blocks in proportion to what it has, `wanted` or
    all there are.

    Args:
        length: tokens per block.
        wanted: blocks of the whole training.
        seed: of their order.
        workers: processes that tokenise; default: one per core.
    Raises: ValueError if there is no text, or less of a source than a block.
    """
    if not sources:
        raise ValueError("the corpus has no text for pretraining: add a source of role text")
    stored = StoredTokenizer.of(tokenizer)
    shares = [source.share for source in sources if source.share is not None]
    if shares:
        counts = limits = largest_remainder(shares, wanted)
    else:
        limits = [wanted] if len(sources) == 1 else [None] * len(sources)
    prepared = [
        prepare_text(source, stored, wanted=None if limit is None else limit * length, workers=workers)
        for source, limit in zip(sources, limits, strict=True)
    ]
    have = [one.counters.get("tokens", 0) // length for one in prepared]
    if not shares:
        counts = largest_remainder(have, min(wanted, sum(have)))
    parts = []
    for source, one, count, there in zip(sources, prepared, counts, have, strict=True):
        if not there and (count or not shares):
            raise ValueError(
                f"source {source.name!r} has {one.counters.get('tokens', 0)} tokens of training text, not "
                f"one block of {length}: give it more text, or leave it out"
            )
        column = one.column("tokens") if "tokens" in one.files else np.empty(0, stored.dtype)
        parts.append(Part(source, one, column, count, min(count, there)))
    return Blocks(parts, length, seed)


def largest_remainder(weights: Sequence[float], total: int) -> list[int]:
    """`total` divided in proportion to the weights, each part within one of its exact share."""
    exact = np.asarray(weights, np.float64) / max(np.sum(weights), 1e-9) * total
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts.tolist()


def prepare_text(
    source: Source, stored: StoredTokenizer, *, wanted: int | None = None, workers: int | None = None
) -> Prepared:
    """The training texts of a source as one column "tokens"; `wanted` tokens of them or all.

    Pieces of the source are taken in a random order, so that a part of a source is like the whole.
    """
    code = [Path(file).read_text(encoding="utf8") for file in _CODE]
    key = fingerprint(identity(source), stored.hash, code)
    folder = artifacts_root() / "data" / "prepared" / f"text-{key}"
    pieces = units(source, unit_bytes=UNIT_BYTES)
    order = permuted(np.arange(len(pieces)), len(pieces), 0) if pieces else []
    return prepare.build(
        folder, [pieces[i] for i in order], TextWork(source, stored),
        wanted=wanted, workers=workers, title=f"tokenising {source.name}",
    )  # fmt: skip


@dataclass(frozen=True)
class TextWork:
    """Tokenises a piece of a text source."""

    source: Source
    stored: StoredTokenizer

    def __call__(self, unit: Unit) -> tuple[dict[str, Column], Counter[str]]:
        counters, dropped = Counter(), Counter()

        def texts():
            for row in reading.read(self.source, unit, dropped):
                if row["split"] == "train":
                    yield row["text"]
                else:
                    counters["held out"] += 1

        end = np.array([self.stored.end], self.stored.dtype)
        parts = [end[:0]]
        for ids in encode(self.stored.load(), texts(), self.stored.dtype):
            parts += [ids, end]
            counters["texts"] += 1
        values = np.concatenate(parts)
        counters["tokens"] = len(values)
        counters.update({f"dropped: {reason}": count for reason, count in dropped.items()})
        return {"tokens": values}, counters
