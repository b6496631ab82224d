"""Rows of a source: formats, layouts, what is refused and how it is said, memory, the mirror."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fake_hub import fake_hub
from unmask.data.files import data_files
from unmask.data.reading import read, units
from unmask.data.registry import Source, split_of

PAIRS = [{"query": f"what is {i}?", "document": f"{i} is a number, ünlike {'x' * i}"} for i in range(50)]
PAIR_COLUMNS = {"query": "query", "document": "document"}


def own(*files: Path, role: str = "pairs", **values: Any) -> Source:
    columns = values.pop("columns", PAIR_COLUMNS if role == "pairs" else {"text": "text"})
    given = {"kind": "files", "language": "eng_Latn", "licence": "CC0-1.0", "bad_rows": "stop"} | values
    return Source(name="mine", role=role, columns=columns, files=tuple(map(str, files)), **given)


def rows_of(source: Source, dropped: Counter[str] | None = None, **options: int) -> list[dict[str, Any]]:
    counted = Counter() if dropped is None else dropped
    return [row for unit in units(source, **options) for row in read(source, unit, counted)]


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    lines = (row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], **options: Any) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    return path


def write_csv(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> Path:
    with path.open("w", encoding="utf8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_arrow(path: Path, rows: list[dict[str, Any]], batch: int = 7) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def write_as(path: Path, rows: list[dict[str, Any]]) -> Path:
    match path.suffixes:
        case [".parquet"]:
            return write_parquet(path, rows, row_group_size=7)
        case [".arrow"]:
            return write_arrow(path, rows)
        case [".csv"]:
            return write_csv(path, rows)
        case [".tsv"]:
            return write_csv(path, rows, "\t")
        case [_, ".gz"]:
            plain = write_jsonl(path.with_suffix(""), rows)
            path.write_bytes(gzip.compress(plain.read_bytes(), 1))
        case [_, ".zst"]:
            plain = write_jsonl(path.with_suffix(""), rows)
            with pa.output_stream(str(path), compression="zstd") as sink:
                sink.write(plain.read_bytes())
        case _:
            return write_jsonl(path, rows)
    plain.unlink()
    return path


def refusal(source: Source) -> str:
    with pytest.raises(ValueError) as caught:
        rows_of(source)
    return str(caught.value)


# --- formats


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.ndjson", "a.parquet", "a.csv", "a.tsv", "a.arrow", "a.jsonl.gz", "a.json.zst"]
)
@pytest.mark.parametrize("unit_bytes", [1, 1 << 20])
def test_every_format_gives_the_rows_whatever_the_size_of_a_piece(
    tmp_path: Path, name: str, unit_bytes: int
) -> None:
    source = own(write_as(tmp_path / name, PAIRS))
    rows = rows_of(source, unit_bytes=unit_bytes)
    assert [(row["query"], row["document"]) for row in rows] == [
        (pair["query"], pair["document"]) for pair in PAIRS
    ]
    assert all(row["key"] == row["document"] and row["split"] == "train" for row in rows)


# --- columns and layouts


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_paths_reach_into_structs_and_lists(tmp_path: Path, name: str) -> None:
    rows = [
        {
            "id": 7,
            "question": "q",
            "answers": {"text": ["first", "second"], "start": [1, 2]},
            "passages": [{"text": "bad", "title": "t"}, {"text": "worse", "title": "u"}],
            "extra": None,
        }
    ]
    columns = {
        "id": "id",
        "query": "question",
        "document": "answers.text.1",
        "negatives": "passages.text",
        "key": "passages.0.title",
    }
    source = own(write_as(tmp_path / name, rows), role="triplets", columns=columns)
    assert rows_of(source) == [
        {
            "id": "7",
            "query": "q",
            "document": "second",
            "negatives": ["bad", "worse"],
            "key": "t",
            "split": "train",
        }
    ]


def test_the_split_is_decided_by_held_by_then_key_then_document(tmp_path: Path) -> None:
    rows = [
        {"query": f"q{i}", "document": f"d{i}", "topic": f"t{i % 20}", "article": f"a{i % 30}"}
        for i in range(300)
    ]
    path = write_parquet(tmp_path / "a.parquet", rows)
    for extra, decides in (
        ({}, "document"),
        ({"key": "topic"}, "topic"),
        ({"held_by": "article"}, "article"),
    ):
        source = own(path, columns=PAIR_COLUMNS | extra, hold_out=0.3)
        found = [row["split"] for row in rows_of(source)]
        assert found == [split_of(source, row[decides]) for row in rows]
        assert set(found) == {"train", "dev", "test"}


# --- bad input: each names file, row and remedy

BAD_LINES = {
    "wrong type": ({"query": 3, "document": "d"}, "query is a number, not text: 3"),
    "no query": ({"query": None, "document": "d"}, "query is null"),
    "empty document": ({"query": "q", "document": "  \n"}, "document is empty or only white space"),
    "lone surrogate": (
        rb'{"query": "ab\ud800", "document": "d"}',
        "lone surrogate (U+D800 at its character 3)",
    ),
    "invalid UTF-8": (b'{"query": "\xff", "document": "d"}', "no UTF-8 at its byte 12"),
    "invalid JSON": (b'{"query": "q", "document": }', "no JSON (Expecting value"),
    "missing column": ({"query": "q"}, "there is no 'document'"),
    "too long": (
        b'{"query": "q", "document": "' + b"x" * 10_000_000 + b'"}',
        "document has 10.0 MB, at most 8 MB are read",
    ),
}


@pytest.mark.parametrize("reason", BAD_LINES)
@pytest.mark.parametrize("unit_bytes", [1 << 24, 60])
def test_a_bad_line_is_refused_with_file_line_and_remedy_or_counted(
    tmp_path: Path, reason: str, unit_bytes: int
) -> None:
    line, detail = BAD_LINES[reason]
    path = write_jsonl(tmp_path / "a.jsonl", [*PAIRS[:2], line, PAIRS[2]])
    with pytest.raises(ValueError) as caught:
        rows_of(own(path), unit_bytes=unit_bytes if reason != "too long" else 1 << 24)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 3: ")
    assert detail in message
    assert "correct it, or have source mine leave such rows out and count them (bad_rows: drop)" in message
    shown = message.splitlines()[1]
    assert shown.strip().startswith('{"query":') and len(shown) <= 84
    dropped: Counter[str] = Counter()
    kept = rows_of(own(path, bad_rows="drop"), dropped)
    assert [row["query"] for row in kept] == [pair["query"] for pair in PAIRS[:3]]
    assert dropped == {reason: 1}


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.csv"])
def test_a_bad_row_of_a_table_is_named(tmp_path: Path, name: str) -> None:
    path = write_as(tmp_path / name, [*PAIRS[:30], {"query": "q", "document": " "}, *PAIRS[30:]])
    where = "line 32" if name == "a.csv" else "row 30"
    assert refusal(own(path)).startswith(
        f"{path}, {where}: document is empty or only white space; correct it"
    )
    dropped: Counter[str] = Counter()
    assert len(rows_of(own(path, bad_rows="drop"), dropped)) == len(PAIRS)
    assert dropped == {"empty document": 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv"])
def test_a_missing_column_is_always_an_error_at_the_start(tmp_path: Path, name: str) -> None:
    path = write_as(tmp_path / name, [{"question": "q", "documents": "d"}])
    source = own(path, columns={"query": "question", "document": "document"}, bad_rows="drop")
    with pytest.raises(ValueError) as caught:
        units(source)
    assert str(caught.value) == (
        f"{path} has no column 'document'; say under `columns` of source mine which one is 'document'; "
        "did you mean 'documents'?"
    )


def test_bytes_that_are_no_utf8_are_found_in_csv_and_parquet(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_bytes(b"text\ngood\nb\xe4d\n")
    assert f"{table}, line 3: text has a lone surrogate (U+DCE4" in refusal(own(table, role="text"))
    path = tmp_path / "a.parquet"
    broken = pa.array([b"good"] * 40 + [b"b\xe4d"] + [b"fine"]).view(pa.string())
    pq.write_table(pa.table({"text": broken}), path)
    assert f"{path}, row 40: a text is no UTF-8 at its byte 2" in refusal(own(path, role="text"))
    dropped: Counter[str] = Counter()
    assert len(rows_of(own(path, role="text", bad_rows="drop"), dropped)) == 41
    assert dropped == {"invalid UTF-8": 1}


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_truncated_file_is_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    path = write_as(tmp_path / name, PAIRS * 20)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * 0.9)])
    for bad_rows in ("stop", "drop"):
        message = refusal(own(path, bad_rows=bad_rows))
        assert message.startswith(f"{path} is truncated or damaged (")
        assert message.endswith("; write, pull or download it again")


def test_other_files_than_expected(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    assert f"{tmp_path / 'a.txt'}: .txt is no known format; there are .parquet, .arrow, .jsonl" in refusal(
        own(tmp_path / "a.txt", role="text")
    )
    (tmp_path / "a.json").write_text('[{"text": "x"}]')
    assert "starts with a JSON array; write one object per line" in refusal(
        own(tmp_path / "a.json", role="text")
    )
    (tmp_path / "a.jsonl").write_text("")
    assert f"{tmp_path / 'a.jsonl'} is empty" in refusal(own(tmp_path / "a.jsonl", role="text"))
    assert "no file " in refusal(own(tmp_path / "none-*.jsonl", role="text"))


BAD_DOCUMENTS = {
    "no chunks": {"chunks": [], "queries": ["q"], "golds": [0]},
    "no queries": {"chunks": ["c"], "queries": [], "golds": []},
    "empty chunks": {"chunks": ["c", " "], "queries": ["q"], "golds": [0]},
    "queries and golds differ": {"chunks": ["c"], "queries": ["q", "r"], "golds": [0]},
    "gold out of range": {"chunks": ["c"], "queries": ["q"], "golds": [1]},
    "wrong type": {"chunks": ["c"], "queries": ["q"], "golds": ["0"]},
}


@pytest.mark.parametrize("reason", BAD_DOCUMENTS)
def test_a_bad_document_is_refused_or_counted(tmp_path: Path, reason: str) -> None:
    good = {"chunks": ["c"], "queries": ["q"], "golds": [0]}
    path = write_jsonl(tmp_path / "a.jsonl", [good, BAD_DOCUMENTS[reason]])
    columns = {name: name for name in good}
    assert refusal(own(path, role="documents", columns=columns)).startswith(f"{path}, line 2: ")
    dropped: Counter[str] = Counter()
    assert len(rows_of(own(path, role="documents", columns=columns, bad_rows="drop"), dropped)) == 1
    assert dropped == {reason: 1}


# --- memory


def peak_megabytes(path: Path, **values: Any) -> float:
    """Peak memory of a process that reads a text source of one file to its end."""
    code = f"""
import re
from collections import Counter
from pathlib import Path
from unmask.data.reading import read, units
from unmask.data.registry import Source

given = dict(kind="files", role="text", language="eng", licence="", columns={{"text": "text"}})
source = Source(name="t", files=({str(path)!r},), **given, **{values!r})
for unit in units(source):
    for row in read(source, unit, Counter()):
        pass
# Not ru_maxrss, which a child inherits from its parent.
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout) / 1024


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.jsonl.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, name: str) -> None:
    noise = random.Random(0)
    rows = [{"text": noise.randbytes(1000).hex()} for _ in range(3_000)]
    peaks = []
    for folder, times in (("one", 1), ("ten", 10)):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / name
        if path.suffix == ".parquet":  # a single row group
            write_parquet(path, rows * times, row_group_size=10**9, use_dictionary=False)
        else:
            write_as(path, rows * times)
        peaks.append(peak_megabytes(path))
    assert peaks[1] < 1.1 * peaks[0] + 8  # the larger file has 60 MB


# --- the mirror


def hand_made_mirror(root: Path) -> Path:
    folder = root / "org" / "name"
    for config in ("deu", "fra"):
        (folder / config).mkdir(parents=True)
        for part in range(2):
            write_parquet(folder / config / f"train-{part}.parquet", [{"text": f"{config} {part}"}])
    (folder / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: deu\n  data_files:\n  - split: train\n    path: deu/train-*.parquet\n"
        "- config_name: fra\n  data_files:\n  - split: train\n    path: fra/train-*.parquet\n"
        "---\n# A data set\n"
    )
    return folder


def mirrored(**values: Any) -> Source:
    given = {
        "kind": "mirror",
        "role": "text",
        "repo": "org/name",
        "config": "deu",
        "columns": {"text": "text"},
    }
    return Source(name="mine", language="deu", licence="", **given | values)


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path / "mirror"))
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path / "artifacts"))
    return hand_made_mirror(tmp_path / "mirror")


@pytest.mark.parametrize("kind", ["mirror", "hub"])
def test_a_mirror_is_read_by_the_readme_of_the_repository(mirror: Path, kind: str) -> None:
    assert [row["text"] for row in rows_of(mirrored(kind=kind))] == ["deu 0", "deu 1"]


def test_a_mirror_may_hold_some_of_the_files(mirror: Path) -> None:
    (mirror / "deu" / "train-1.parquet").unlink()
    for file in (mirror / "fra").iterdir():
        file.unlink()
    assert [row["text"] for row in rows_of(mirrored())] == ["deu 0"]
    assert "no file of split train is in" in refusal(mirrored(config="fra"))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"config": "due"},
            "Source mine: org/name has no configuration 'due'; did you mean 'deu'?",
        ),
        ({"config": ""}, "org/name has no configuration 'default'; did you mean 'deu'?"),
        ({"split": "test"}, "org/name, configuration deu has no split 'test'; known: train"),
        ({"repo": "org/other"}, "org/other is not in the mirror"),
    ],
)
def test_what_a_mirror_does_not_hold_is_named(mirror: Path, values: dict[str, str], expected: str) -> None:
    assert expected in refusal(mirrored(**values))


def test_the_hub_is_read_over_the_wire_and_its_refusals_say_what_to_do(tmp_path: Path) -> None:
    parquet, lines = tmp_path / "a.parquet", tmp_path / "a.jsonl"
    write_parquet(parquet, PAIRS, row_group_size=20)
    write_jsonl(lines, PAIRS)
    files = {
        "README.md": b"---\nconfigs:\n- config_name: table\n  data_files: a.parquet\n"
        b"- config_name: lines\n  data_files: a.jsonl.gz\n---\n",
        "a.parquet": parquet.read_bytes(),
        "a.jsonl.gz": gzip.compress(lines.read_bytes()),
    }
    code = """
import sys
from collections import Counter
from unmask.data.reading import read, units
from unmask.data.registry import Source

columns = {"query": "query", "document": "document"}
for repo, config in [name.split() for name in sys.argv[1:]]:
    source = Source("mine", "hub", "pairs", "eng", "", repo=repo, config=config, columns=columns)
    try:
        pieces = units(source, unit_bytes=100)
        rows = [row["query"] for unit in pieces for row in read(source, unit, Counter())]
        print(len(pieces), len(rows), rows[-1])
    except ValueError as error:
        print(error)
"""
    asked = ["org/name table", "org/name lines", "org/none table", "org/gated table"]
    with fake_hub() as hub:
        hub.add("dataset", "org/name", files)
        hub.add("dataset", "org/gated", files, gated=True)
        found = []
        for endpoint, names in ((hub.url, asked), ("http://127.0.0.1:9", asked[:1])):
            settings = {
                "HF_ENDPOINT": endpoint,
                "HF_HUB_OFFLINE": "0",
                "HF_HOME": str(tmp_path),
                "UNMASK_MIRROR": "",
            }
            done = subprocess.run(
                [sys.executable, "-c", code, *names],
                env=os.environ | settings, capture_output=True, text=True, check=True,
            )  # fmt: skip
            found += done.stdout.splitlines()
    table, compressed, unknown, gated, unreachable = found
    assert table == "3 50 what is 49?" and compressed == "1 50 what is 49?"
    assert unknown == "Source mine: org/none is not on the Hub, or private: correct `repo`, or set HF_TOKEN"
    assert "org/gated is gated: accept its terms on its page on the Hub, and set HF_TOKEN" in gated
    assert "the Hub cannot be reached (" in unreachable
    assert "`unmask mirror pull --preset NAME --to DIR`" in unreachable


def with_manifest(folder: Path) -> Path:
    files = {}
    for path in sorted(folder.glob("*/*.parquet")):
        data = path.read_bytes()
        files[str(path.relative_to(folder))] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {"repo": "org/name", "type": "dataset", "revision": "a" * 40, "files": files}
    (folder / ".unmask-mirror.json").write_text(json.dumps(manifest))
    return folder


def test_a_pulled_file_is_verified_before_its_first_row(mirror: Path, tmp_path: Path) -> None:
    with_manifest(mirror)
    assert len(rows_of(mirrored())) == 2
    assert len(list((tmp_path / "artifacts" / "data" / "verified").iterdir())) == 2
    path = mirror / "deu" / "train-1.parquet"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    message = refusal(mirrored())
    assert message.startswith(f"{path} has a wrong checksum (SHA-256 ")
    assert "`unmask mirror check`" in message and "`unmask mirror pull`" in message


def test_a_pulled_file_of_the_wrong_size_or_gone_is_named_at_the_start(mirror: Path) -> None:
    with_manifest(mirror)
    path = mirror / "deu" / "train-1.parquet"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"bytes, not .*: `unmask mirror pull` fetches it again"):
        data_files(mirrored())
    path.unlink()
    with pytest.raises(ValueError, match="was pulled and is gone: `unmask mirror pull`"):
        data_files(mirrored())
    assert len(data_files(mirrored(config="fra"))) == 2


def test_a_mirror_of_another_revision_is_refused(mirror: Path) -> None:
    with_manifest(mirror)
    assert len(data_files(mirrored(revision="a" * 40))) == 2
    assert f"the mirror holds revision {'a' * 40} of org/name, not {'b' * 40}" in refusal(
        mirrored(revision="b" * 40)
    )
