"""Tokenising text into memory-mapped files, against the tokenizer library alone; and its memory.

Ours reads JSON lines, checks them, tokenises in as many processes as there are cores, collects and writes:
start of the processes included. The library has the texts in memory, uses all cores in its own threads, and
its encodings are thrown away.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path

import numpy as np
from joblib import cpu_count
from measure import Case, Row

from unmask.data.registry import Source
from unmask.data.tokenized import Prepared, prepare_text
from unmask.data.tokens import StoredTokenizer, train_tokenizer

MEGABYTES, VOCABULARY = 30, 8_192
LARGEST = 200_000  # characters of a file that is taken


def texts(megabytes: float) -> Iterator[str]:
    """Source code of the standard library and of the installed packages, again and again if need be."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "purelib")]
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.py"))]
    size = 0
    while True:
        for file in files:
            if 500 < file.stat().st_size < LARGEST:
                text = file.read_text(encoding="utf8", errors="replace")
                size += len(text)
                yield text
                if size > megabytes * 1e6:
                    return


@cache
def workspace() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="unmask-preparation-"))
    os.environ["UNMASK_ARTIFACTS"] = str(folder)
    return folder


def source(megabytes: float) -> Source:
    path = workspace() / f"{megabytes}.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts(megabytes))
    return Source(
        name="code", kind="files", role="text", language="python", licence="",
        files=(str(path),), columns={"text": "text"}, bad_rows="drop",
    )  # fmt: skip


def stored_tokenizer() -> StoredTokenizer:
    return StoredTokenizer.of(train_tokenizer(texts(4), VOCABULARY, workspace() / "tokenizer"))


def preparation_case(megabytes: float = MEGABYTES) -> Case:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    one, stored = source(megabytes), stored_tokenizer()
    every, tokenizer = list(texts(megabytes)), stored.load()

    def ours() -> Prepared:
        done = prepare_text(one, stored)
        shutil.rmtree(done.folder)
        return done

    def library(size: int) -> int:
        return sum(
            len(encoding)
            for start in range(0, len(every), size)
            for encoding in tokenizer.encode_batch_fast(every[start : start + size], add_special_tokens=False)
        )

    def check() -> None:
        done = prepare_text(one, stored)
        column = done.column("tokens")
        shutil.rmtree(done.folder)  # what is mapped stays readable
        assert (column == stored.end).sum() >= len(every)
        assert len(column) == library(500) + len(every)
        assert np.max(column) < VOCABULARY

    programs = {
        "unmask": {"": ours},
        "tokenizers": {
            "500 texts at a time": lambda: library(500),
            "all at once": lambda: library(len(every)),
        },
    }
    setting = f"{len(every):,} Python files, {megabytes} MB, vocabulary {VOCABULARY:,}, {cpu_count()} cores"
    return Case(setting, "MB/s", sum(map(len, every)) / 1e6, programs, check)


def memory(megabytes: float = 10) -> list[Row]:
    """Peak memory with ten times the text, of the main process and of the largest worker."""
    found, stored = {}, stored_tokenizer()
    for times in (1, 10):
        folder = workspace() / str(times)
        folder.mkdir()
        facts = (asdict(source(megabytes * times)), asdict(stored) | {"path": str(stored.path)})
        command = [
            sys.executable,
            str(Path(__file__).with_name("preparation_memory.py")),
            *map(json.dumps, facts),
        ]
        environment = os.environ | {"UNMASK_ARTIFACTS": str(folder)}
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        found[times] = json.loads(done.stdout)
    setting = f"{megabytes * 10} MB of text; peer: {megabytes} MB"
    return [
        Row(f"ten times the text: peak memory, {who}", large, small, small / large, "MiB", setting)
        for who in ("main process", "a worker")
        for large, small in [(found[10][who], found[1][who])]
    ]


CASES = {"preparation": preparation_case}
