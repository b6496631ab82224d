"""Tokenising text into memory-mapped files, against the tokenizer library alone.

Ours reads JSON lines, checks them, tokenises in as many processes as there are cores, collects and writes:
start of the processes included. The library has the texts in memory, uses all cores in its own threads, and
its encodings are thrown away.
"""

import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from joblib import cpu_count
from measure import Case

from unmask.data.registry import Source
from unmask.data.tokenized import Prepared, prepare_text
from unmask.data.tokens import StoredTokenizer, train_tokenizer

FILES, TEXTS, VOCABULARY = 16, 250, 8_192  # files of so many texts


def texts() -> Iterator[str]:
    """Source code of the standard library and of the installed packages."""
    for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for file in sorted(Path(folder).rglob("*.py")):
            if 500 < file.stat().st_size < 200_000:  # bytes
                yield file.read_text(encoding="utf8", errors="replace")


def preparation_case() -> Case:
    folder = Path(tempfile.mkdtemp(prefix="unmask-preparation-"))
    os.environ |= {"UNMASK_ARTIFACTS": str(folder), "TOKENIZERS_PARALLELISM": "true"}
    every = list(islice(texts(), FILES * TEXTS))
    for number in range(FILES):
        lines = [json.dumps({"text": text}) for text in every[number::FILES]]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    place = {"files": (f"{folder}/*.jsonl",), "columns": {"text": "text"}, "bad_rows": "drop"}
    source = Source("code", "files", "text", "python", "", **place)
    stored = StoredTokenizer.of(train_tokenizer(every[:500], VOCABULARY, folder / "tokenizer"))
    tokenizer = stored.load()

    def ours() -> Prepared:
        done = prepare_text(source, stored)
        shutil.rmtree(done.folder)
        return done

    def library(size: int) -> int:
        return sum(
            len(encoding)
            for start in range(0, len(every), size)
            for encoding in tokenizer.encode_batch_fast(every[start : start + size], add_special_tokens=False)
        )

    def check() -> None:
        assert ours().counters["tokens"] == library(500) + len(every)

    programs = {
        "unmask": {"": ours},
        "tokenizers": {"500 texts at a time": lambda: library(500), "at once": lambda: library(len(every))},
    }
    megabytes = sum(map(len, every)) / 1e6
    setting = f"{len(every):,} Python files, {megabytes:.0f} MB, {VOCABULARY:,} tokens, {cpu_count()} cores"
    return Case(setting, "MB/s", megabytes, programs, check)


CASES = {"preparation": preparation_case}
