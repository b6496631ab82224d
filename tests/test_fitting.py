"""`fit`: rows of one's own in, an embedder out, and what is refused before anything is loaded."""

import doctest
import json
import subprocess
import sys

import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer

import tiny
from unmask import Embedder, fit, fitting
from unmask.models import backbone
from unmask.training import TrainingStopped, Watch

PAIRS = [(f"how is {i} written?", f"{i} is written with {len(str(i))} digits") for i in range(40)]
DOCUMENTS = [
    {"chunks": [f"{i} comes first.", f"Then comes {i + 1}."], "queries": [f"after {i}?"], "golds": [1]}
    for i in range(30)
]
SHORT = {"steps": 3, "precision": "fp32"}


@pytest.fixture
def model(tmp_path):
    return backbone.save(tiny.model(bidirectional=False), tiny.tokenizer(), tmp_path / "model")


def test_the_example_runs(model):
    finder = doctest.DocTestFinder(recurse=False).find(fit, "fit", globs={"fit": fit, "model": model})
    runner = doctest.DocTestRunner()
    for one in finder:
        runner.run(one)
    assert runner.tries > 0 and runner.failures == 0


def test_it_learns_and_says_that_it_helped(model, capsys):
    embedder = fit(model, PAIRS, steps=25, lr=3e-3, batch=36)
    helped = embedder.helped
    assert (helped.queries, helped.texts) == (4, 40)
    assert helped.after > helped.before and str(helped) in capsys.readouterr().out
    assert backbone.sees_both_sides(embedder.model) and embedder.checkpoint is None


ROWS = {
    "pair": [dict(zip(("query", "document"), pair)) for pair in PAIRS],
    "triplet": [(*pair, [PAIRS[i - 1][1]]) for i, pair in enumerate(PAIRS)],
    "contextual": DOCUMENTS,
}


@pytest.mark.parametrize("stage", ROWS)
def test_every_stage_trains_on_rows(model, stage):
    embedder = fit(Embedder.from_pretrained(model), ROWS[stage], stage=stage, **SHORT)
    assert embedder.helped.queries >= 3


def test_diffusion_reads_texts(tmp_path):
    start = backbone.save(tiny.model(bidirectional=False, head=True), tiny.tokenizer(), tmp_path / "model")
    embedder = fit(start, [text for _, text in PAIRS], stage="diffusion", length=16, **SHORT)
    assert embedder.helped is None and embedder.encode(["7"]).shape == (1, 32)


def test_a_data_set_is_read_and_the_result_loads_elsewhere(model, tmp_path):
    embedder = fit(model, Dataset.from_list(ROWS["pair"]), hold_out=0, **SHORT)
    assert embedder.helped is None
    theirs = SentenceTransformer(str(embedder.save_pretrained(tmp_path / "mine")))
    ours = embedder.encode(["how is 7 written?"], "float32")
    assert abs(theirs.encode(["how is 7 written?"]) - ours).max() <= 1e-4 * abs(ours).max()


def test_rows_that_share_a_text_are_one_group(capsys):
    rows = [
        *ROWS["pair"],
        {"query": "another", "document": PAIRS[0][1]},
        {"query": "another", "document": "b"},
    ]
    group_N = fitting._groups("pair", rows)
    assert len({group_N[0], group_N[-1], group_N[-2]}) == 1 and len(set(group_N)) == 40
    held_N = fitting._held_out(group_N, 0.1, "pair")
    assert len(set(group_N[held_N])) == 4 and not set(group_N[held_N]) & set(group_N[~held_N])
    assert not fitting._held_out(group_N[:10], 0.1, "pair").any()
    assert "too few to hold any out" in capsys.readouterr().out


def test_interrupted_it_goes_on(model, tmp_path, monkeypatch):
    def told(self, row):
        if row.get("step") == 2:
            raise TrainingStopped("told to stop")

    options = {"steps": 6, "precision": "fp32", "checkpoint_seconds": 0, "folder": tmp_path / "kept"}
    with monkeypatch.context() as patched, pytest.raises(TrainingStopped):
        patched.setattr(Watch, "__call__", told)
        fit(model, PAIRS, **options)
    done = []
    monkeypatch.setattr(Watch, "__call__", lambda self, row: done.append(row.get("done")))
    first = fit(model, PAIRS, **options)
    assert done[0] == 2
    whole = fit(model, PAIRS, **options | {"folder": tmp_path / "whole"})
    weights = [(one.checkpoint / "model.safetensors").read_bytes() for one in (first, whole)]
    assert weights[0] == weights[1]


REFUSED = {
    "no rows": ([], {}, "0 rows: a training needs two"),
    "another stage": (PAIRS, {"stage": "pairs"}, "unknown stage 'pairs'; did you mean 'pair'"),
    "unknown key": (PAIRS, {"lrr": 1.0}, "pair: unknown key 'lrr'; did you mean 'lr'"),
    "bad value": (PAIRS, {"lr": -1.0}, "lr"),
    "no column": (
        [{"query": "a", "documents": "b"}],
        {},
        "row 0 has no 'document'; did you mean 'documents'",
    ),
    "three columns": ([("a", "b", "c")], {}, r"row 0 is .*: give \(query, document\)"),
    "one text": ("ab", {}, r"row 0 is \('a',\): give \(query, document\)"),
    "empty text": ([("a", "b"), ("a", " ")], {}, "row 1: document must be a text that is not empty"),
    "number": ([("a", 7)], {}, "row 0: document must be a text"),
    "hold_out": (PAIRS, {"hold_out": 1.0}, "hold_out must be a share below 1"),
    "gold": (
        [DOCUMENTS[0] | {"golds": [2]}],
        {"stage": "contextual"},
        "row 0: golds must be .* 0 to 1, for each",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_named(case, tmp_path):
    rows, options, message = REFUSED[case]
    start = tmp_path / "nothing" if case != "bad value" else tiny_start(tmp_path)  # nothing is loaded
    with pytest.raises(ValueError, match=message):
        fit(start, rows, **options)


def tiny_start(folder):
    return backbone.save(tiny.model(), tiny.tokenizer(), folder / "model")


SCRIPT = """import json
from unmask import fit
pairs = [json.loads(line) for line in open("pairs.jsonl")]
embedder = fit("model", pairs, steps=4)
embedder.save_pretrained("mine")
"""


@pytest.mark.slow
def test_a_script_of_five_lines_trains_on_a_file(model, tmp_path):
    lines = [json.dumps(row) for row in ROWS["pair"]]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "before" in done.stdout and "after, BM25" in done.stdout
    assert SentenceTransformer(str(tmp_path / "mine")).encode(["7"]).shape == (1, 32)
