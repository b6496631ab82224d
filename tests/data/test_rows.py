"""Rows of a source: formats, layouts, what is refused and how it is said; the mirror, the Hub."""

import bz2
import csv
import gzip
import json
import lzma
import os
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pyarrow as pa
import pytest

import tiny
from fake_hub import fake_hub, known_hub
from tiny_sources import PAIR_COLUMNS, own, write_as
from unmask.data import rows as module
from unmask.data.registry import Source, split_of
from unmask.data.rows import content_hash, data_files, read, units

PAIRS = [{"query": "NA", "document": "007"}, {"query": "null", "document": "3.50"}]  # in CSV text, too
PAIRS += [{"query": f"what is {i}?", "document": f"{i} is a number, ünlike {'x' * i}"} for i in range(2, 50)]


def rows_of(source, dropped=None):
    dropped = Counter() if dropped is None else dropped
    return [row for unit in units(source) for row in read(source, unit, dropped)]


def refusal(source):
    with pytest.raises(ValueError) as caught:
        rows_of(source)
    return str(caught.value)


# --- formats, columns and layouts


@pytest.mark.parametrize("suffix", ["jsonl", "ndjson", "parquet", "csv", "tsv", "arrow", "jsonl.gz"])
@pytest.mark.parametrize("size", [20, 1 << 20])
def test_every_format_gives_the_rows_whatever_the_size_of_a_piece(tmp_path, suffix, size, monkeypatch):
    """A row that is refused is named by its place in the whole file; a text that shows nothing is empty."""
    monkeypatch.setattr(module, "UNIT_BYTES", size)
    path = tmp_path / f"a.{suffix}"
    source = own(write_as(path, PAIRS))
    assert len(units(source)) > 1 or size > 20 or suffix not in ("parquet", "arrow")
    assert rows_of(source) == [pair | {"key": pair["document"], "split": "train"} for pair in PAIRS]
    write_as(path, [*PAIRS[:40], PAIRS[0] | {"document": "\u200b\u2060 \x07"}, *PAIRS[40:]])
    assert refusal(source).startswith(f"{path}, row 41: document is no text, or empty")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_paths_reach_into_structs_and_lists(tmp_path, name):
    row = {"id": 7, "question": "q", "answers": {"text": ["one", "two"], "start": [1, 2]}}
    row |= {"passages": [{"text": "bad", "title": "t"}, {"text": "worse", "title": "u"}]}
    columns = {"id": "id", "query": "question", "document": "answers.text.1", "key": "passages.0.title"}
    path = write_as(tmp_path / name, [row])
    expected = {"id": "7", "query": "q", "document": "two", "key": "t", "split": "train"}
    cases = {"passages.text": ["bad", "worse"], "question": ["q"], "question, answers.text.0": ["q", "one"]}
    for negatives, texts in cases.items():
        source = own(path, role="triplets", columns=columns | {"negatives": negatives})
        assert rows_of(source) == [expected | {"negatives": texts}]
    path = write_as(tmp_path / name, [{"q.text": "q", "d": "x"}])
    assert rows_of(own(path, columns={"query": "q.text", "document": "d"}))[0]["query"] == "q"


def test_texts_of_json_stay_as_they_are_whatever_other_rows_hold(tmp_path):
    rows = [{"query": "2020-01-01", "document": "y"}, {"query": "z", "document": 5}]
    rows += [{"query": "007", "document": "late", "column": [1]}]
    lines = "\n\n".join(map(json.dumps, rows))
    for name, text in {"a.json": json.dumps(rows, indent=1), "b.jsonl": lines}.items():
        (tmp_path / name).write_text(text, encoding="utf-8-sig" if name == "b.jsonl" else "utf8")
        good = rows_of(own(tmp_path / name, bad_rows="drop"), dropped := Counter())
        assert [row["query"] for row in good] == ["2020-01-01", "007"] and dropped.total() == 1
    assert f"{tmp_path / 'b.jsonl'}, row 3: " in refusal(own(tmp_path / "b.jsonl"))  # the line


def test_the_split_is_decided_by_held_by_then_key_then_document(tmp_path):
    row = {"query": "q"}
    rows = [row | {"document": f"d{i}", "topic": f"t{i % 20}", "by": f"a{i % 30}"} for i in range(300)]
    path = write_as(tmp_path / "a.parquet", rows)
    for decides, extra in (("document", {}), ("topic", {"key": "topic"}), ("by", {"held_by": "by"})):
        source = own(path, columns=PAIR_COLUMNS | extra, hold_out=0.3)
        splits = [row["split"] for row in rows_of(source)]
        assert splits == [split_of(source, row[decides]) for row in rows] and len({*splits}) == 3


def test_a_field_of_csv_may_be_long_and_the_limit_of_the_process_stays(tmp_path):
    long, limit = PAIRS[0] | {"document": "x" * 300_000}, csv.field_size_limit()
    for row in read(source := own(write_as(tmp_path / "a.csv", [long])), *units(source), Counter()):
        assert row["document"] == long["document"] and csv.field_size_limit() == limit


def test_a_text_is_a_line_whatever_stands_in_it(tmp_path):
    lines = ["first", "progress 10%\rprogress 99%", "a\u2028b", "last"]
    (tmp_path / "a.txt").write_bytes("\r\n".join(lines).encode())
    assert [row["text"] for row in rows_of(own(tmp_path / "a.txt", role="text"))] == lines


NAMES = ["a::b.jsonl", "file::a.csv", "a#b.tsv", "a?b.parquet", "a%20*[1]{2}.arrow", "a\n b.jsonl", "a.JSONL"]


@pytest.mark.parametrize("name", NAMES)
def test_a_path_may_hold_any_character(tmp_path, name):
    lower = write_as(tmp_path / f"a{Path(name).suffix.lower()}", PAIRS)
    assert len(rows_of(own(lower.rename(tmp_path / name)))) == len(PAIRS)


# --- bad input: each names file, row and remedy

PAIR, NESTED = PAIRS[0], {"chunks": ["c"], "queries": ["q"], "golds": [0]}
BAD_ROWS = [
    ("jsonl", PAIR, {"query": 3}, "query is no text, or empty: 3"),
    ("parquet", PAIR, {"document": "  \n"}, "document is no text, or empty: "),
    # Else all rows without a topic would be one group, and in one split.
    ("arrow", PAIR | {"key": "k"}, {"key": None}, "key is no text, or empty: None"),
    ("jsonl", PAIR | {"held_by": "h"}, {"held_by": float("nan")}, "held_by is no text, or empty: nan"),
    ("jsonl", NESTED, {"chunks": []}, "chunks is no text, or empty: []"),
    ("parquet", NESTED, {"queries": ["q", "r"]}, "golds are not the number of a chunk"),
    ("parquet", NESTED, {"golds": [1]}, "golds are not the number of a chunk, from 0, for each query: [1]"),
]


@pytest.mark.parametrize(("suffix", "good", "bad", "detail"), BAD_ROWS)
def test_a_bad_row_is_refused_or_counted(tmp_path, suffix, good, bad, detail):
    path = write_as(tmp_path / f"a.{suffix}", [good, good, good | bad, good])
    source = own(path, role="documents" if good is NESTED else "pairs", columns={name: name for name in good})
    message = refusal(source)
    assert message.startswith(f"{path}, row 3: {detail}")
    assert message.endswith("; correct it (in a registry `bad_rows: drop` leaves such rows out)")
    rest = rows_of(replace(source, bad_rows="drop"), dropped := Counter())
    ((reason, count),) = dropped.items()
    assert (len(rest), count) == (3, 1) and message.startswith(f"{path}, row 3: {reason}")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv"])
def test_a_missing_column_is_named(tmp_path, name):
    path = write_as(tmp_path / name, [{"question": "q", "documents": "d"}])
    message = refusal(own(path, columns={"query": "question", "document": "document"}))
    assert message.startswith(str(path)) and "no 'document'; did you mean 'documents'?" in message


LINE = b'{"query": "q", "document": "d"}\n'
UNKNOWN = "in no known format; there are .parquet, .arrow"
UNREADABLE = {
    "a.jsonl": (LINE * 2 + b'{"query": "q", "document": }\n', "line 3: Expecting value"),
    "b.jsonl": (LINE + b'{"query": "\xff", "document": "d"}\n', "line 2: 'utf-8' codec can't decode"),
    "d.jsonl.gz": (gzip.compress(LINE * 999)[:-20], "Compressed file ended"),
    "p.jsonl.zst": (pa.compress(LINE * 999, "zstd", asbytes=True)[:-9], "Truncated compressed stream"),
    "e.jsonl": (LINE + b'{"query": "\\ud83d", "document": "d"}\n', "line 2: 'utf-8' codec can't encode"),
    "g.jsonl": (LINE + b"7\n", "line 2: no names and values in braces"),
    "f.csv": (b"query,document\na,b\nb,c,d\n", "line 3: other than 2 fields"),
    "l.csv": (b"query,document,other\na,b\n", "line 2: other than 3 fields"),
    "s.csv": (b'query,document\n"a,b\nc,d\n', "unexpected end of data"),
    # As those write it who do not quote: six rows, three, one for each line.
    "m.tsv": (b'query\tdocument\n"a\tb\nc"\td\n' * 3, "to line 3, a quote that opens a field"),
    "o.tsv": (b'text\n"a\nb"\n', "to line 3, a quote that opens a field takes in others"),
    "q.tsv": (b'query\tdocument\n"a\tb\n"c\td\n', "expected after"),
    "h.parquet": (b"PAR1 no more", "Parquet magic bytes not found"),
    "i.jsonl": (b"", UNKNOWN),
    "k.arrow": (b"ARROW1 of another kind", "Not an Arrow file"),
    "j.doc": (b"x", UNKNOWN),
    "r.arrow.gz": (gzip.compress(b"ARROW1"), "metadata bytes"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_parsed_is_named_whatever_becomes_of_bad_rows(tmp_path, name):
    path, (data, detail) = tmp_path / name, UNREADABLE[name]
    path.write_bytes(data)
    message = refusal(own(path, bad_rows="drop"))
    assert message.startswith((f"{path} cannot be read (", f"{path} is empty, or ")) and detail in message


def test_an_arrow_file_of_either_format_is_read_whole_or_not_at_all(tmp_path):
    path = write_as(tmp_path / "a.arrow", PAIRS)
    stream = path.read_bytes()
    table = pa.ipc.open_stream(stream).read_all()
    with pa.ipc.new_file(tmp_path / "b.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    assert rows_of(own(tmp_path / "b.arrow")) == rows_of(own(path))
    ends = [end for end in range(8, len(stream), 8) if stream[end : end + 4] == b"\xff" * 4]
    assert len(ends) == 9  # of the schema, and of eight batches of rows: pyarrow reads up to each of them
    for data in (*(stream[:end] for end in ends), stream * 2):
        path.write_bytes(data)
        assert "its end is missing, or something follows it" in refusal(own(path))


# --- the mirror and the Hub


def mirrored(**values):
    given = {"kind": "mirror", "role": "text", "repo": "org/name", "config": "deu"}
    return Source(name="mine", language="deu", licence="", columns={"text": "text"}, **given | values)


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """The folder of a repository: three configurations by its README, of the first no file."""
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path / "mirror"))
    folder = tmp_path / "mirror" / "org" / "name"
    for config, part in product(("deu", "fra"), range(2)):
        write_as(folder / config / f"train-{part}.parquet", [{"text": f"{config} {part}"}])
    tiny.write_card(folder, {config: f"{config}/train-*.parquet" for config in ("ces", "deu", "fra")})
    return folder


def test_a_mirror_is_read_by_the_readme_of_a_repository_or_by_its_folders(mirror):
    assert [row["text"] for row in rows_of(mirrored(kind="hub"))] == ["deu 0", "deu 1"]
    (mirror / "deu" / "train-1.parquet").unlink()  # it may hold as many files of a text as are needed
    assert [row["text"] for row in rows_of(mirrored())] == ["deu 0"]
    (mirror / "README.md").unlink()
    module._configurations.cache_clear()
    assert [row["text"] for row in rows_of(mirrored(config="fra"))] == ["fra 0", "fra 1"]


COMPRESSED = {"bz2": bz2.compress, "gz": gzip.compress, "xz": lzma.compress}
COMPRESSED |= {"zst": partial(pa.compress, codec="zstd", asbytes=True)}


@pytest.mark.parametrize("compressed", COMPRESSED)
def test_a_mirror_skips_no_compressed_table(mirror, compressed):
    path = mirror / "deu" / f"train-2.jsonl.{compressed}"
    path.write_bytes(COMPRESSED[compressed](b'{"text": "deu 2"}\n'))
    tiny.write_card(mirror, {"deu": "deu/train-*"})
    assert [row["text"] for row in rows_of(mirrored())] == ["deu 0", "deu 1", "deu 2"]


ABSENT = [
    ({"config": "due"}, "Source mine: org/name has no configuration 'due'; did you mean 'deu'?"),
    ({"config": ""}, "org/name has no configuration 'default'; did you mean 'deu'?"),
    ({"split": "test"}, "org/name, deu has no split 'test'; known: train"),
    ({"config": "ces"}, "org/name cannot be read (no table of ces, split train); with internet"),
    ({"repo": "org/other"}, "org/other cannot be read ("),
]


@pytest.mark.parametrize(("values", "expected"), ABSENT)
def test_what_a_mirror_does_not_hold_is_named(mirror, values, expected):
    assert expected in refusal(mirrored(**values))


def test_what_was_pulled_is_read_in_the_revision_that_is_asked_for(mirror):
    trees = mirror / ".cache" / "huggingface" / "trees"  # where snapshot_download keeps what there is
    trees.mkdir(parents=True)
    (trees / f"{'a' * 40}.json").touch()
    assert len(data_files(mirrored(revision="a" * 40))) == 2
    before = content_hash(mirrored())
    os.utime(mirror / "deu" / "train-1.parquet", ns=(1, 1))
    assert content_hash(mirrored()) == before  # its content is known
    wrong = refusal(mirrored(revision="b" * 40))
    assert f"the mirror holds revision {'a' * 40} of org/name, not {'b' * 40}" in wrong


def test_the_hub_is_read_over_the_wire_and_its_refusals_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "UNIT_BYTES", 2000)
    table, lines, absent, gated = (
        Source("mine", "hub", "pairs", "eng", "", repo=f"org/{name}", columns=PAIR_COLUMNS)
        for name in ("table.parquet", "lines.jsonl.gz", "none", "gated")
    )
    with fake_hub() as hub:
        for source in (table, lines):
            file = write_as(tmp_path / Path(source.repo).name, PAIRS)
            hub.add("dataset", source.repo, {f"train.{source.repo.partition('.')[2]}": file.read_bytes()})
            assert [row["query"] for row in rows_of(source)] == [row["query"] for row in PAIRS]
        assert len(units(table)) > 1 == len(units(lines))
        hub.add("dataset", "org/gated", {"README.md": b""}, gated=True)
        refusals = [refusal(absent), refusal(gated)]
    with known_hub("http://127.0.0.1:9"):
        refusals.append(refusal(table))
    for message, part in zip(refusals, ["Repository Not Found", "restricted", "refused"], strict=True):
        assert part in message and message.endswith("; UNMASK_MIRROR=DIR serves it here")
