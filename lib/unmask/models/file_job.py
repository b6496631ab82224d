"""Embeddings of a file of texts, in a file: what `unmask encode` does.

Legend: N texts, D dimensions (bytes for "ubinary").
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

from unmask.data import reading
from unmask.data.registry import Source
from unmask.data.tokens import batches
from unmask.models.embedder import Embedder
from unmask.store import write_atomic

CHARACTERS = 20_000_000  # of texts that are in memory, and that an interruption costs at most


def encode_file(
    model: str | Path,
    texts: Path,
    output: Path,
    *,
    column: str = "text",
    precision: str = "int8",
    dimensions: int | None = None,
) -> Path:
    """Embeds the texts of a file, in bounded memory. What was interrupted goes on where it stood.

    Args:
        model: what `Embedder.from_pretrained` loads.
        texts: a file that `data.reading` reads, or .txt with a text in each line.
        output: an .npy file, (N, D), as `Embedder.encode` returns it; it appears when all of it is written.
        column: the texts in their file.
        precision, dimensions: as for `Embedder.encode`.
    Raises: ValueError for a row without a text, naming file and row, before anything is computed; for an
        output that is no .npy file; and as `Embedder.encode`.
    """
    if output.suffix != ".npy" or not output.parent.is_dir():
        raise ValueError(f"{output}: the embeddings go into an .npy file in a folder that exists")
    total = sum(1 for _ in tqdm(_texts(texts, column), unit="text", desc="reading"))
    embedder = Embedder.from_pretrained(model)
    none = embedder.encode([], precision, dimensions)
    partial, count = _unfinished(output, _identity(model, texts, column, precision, dimensions))
    done = int(count.read_text()) if count.is_file() and partial.is_file() else 0
    shape = (total, none.shape[1])
    rows_ND = np.lib.format.open_memmap(partial, "r+" if done else "w+", none.dtype, shape)
    with tqdm(total=total, initial=done, unit="text", desc="embedding") as bar:
        for batch in batches(islice(_texts(texts, column), done, None), len, CHARACTERS):
            rows_ND[done : done + len(batch)] = embedder.encode(batch, precision, dimensions)
            rows_ND.flush()
            done += len(batch)
            write_atomic(count, str(done))
            bar.update(len(batch))
    os.replace(partial, output)
    count.unlink(missing_ok=True)
    return output


def _texts(path: Path, column: str) -> Iterator[str]:
    if path.suffix == ".txt":
        with path.open(encoding="utf8") as file:
            for number, line in enumerate(file, 1):
                if line.isspace():
                    raise ValueError(f"{path}, line {number} is empty: each line is a text; remove it")
                yield line.removesuffix("\n")
        return
    source = Source(
        name=path.name, kind="files", role="text", language="und", licence="", bad_rows="stop",
        files=(str(path.resolve()),), columns={"text": column},
    )  # fmt: skip
    for unit in reading.units(source):
        yield from (row["text"] for row in reading.read(source, unit, Counter()))


def _identity(model: str | Path, texts: Path, *request: object) -> str:
    """What must be the same for an interrupted job to be continued."""
    files = [texts, *(sorted(Path(model).iterdir()) if Path(model).is_dir() else ())]
    facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr((str(model), facts, request)).encode()).hexdigest()[:16]


def _unfinished(output: Path, identity: str) -> tuple[Path, Path]:
    """The unfinished output, and the file with its number of rows; those of other jobs are cleared away."""
    names = [f".{output.name}.{identity}.{kind}" for kind in ("partial", "rows")]
    for old in output.parent.glob(f".{output.name}.*"):
        if old.name not in names:
            old.unlink()
    return tuple(output.with_name(name) for name in names)
