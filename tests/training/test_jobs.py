"""Jobs: the stages' data from a corpus of a few sentences, and trainings on it."""

import json

import numpy as np
import pytest
from datasets import Dataset
from sentence_transformers import SentenceTransformer

import tiny
import tiny_corpus
from unmask.config import load_preset, resolved
from unmask.data.tokens import tokenize
from unmask.models import backbone
from unmask.models.embedder import Embedder
from unmask.store import fingerprint
from unmask.training.loop import data_report, job_identity, prepare_data, run_job
from unmask.training.neighbours import drawn_batches
from unmask.training.stages import Job

TINY = {
    "steps": 2,
    "batch": 4,
    "precision": "fp32",
    "compile": False,
    "checkpoint_every": 10,
    "warmup": 0,
    "decay": 0,
}
OWN = {
    "diffusion": {"length": 16},
    "pair": {"query_length": 6, "document_length": 16, "curriculum": [1.0, 0.0, 0.0]},
    "contextual": {"query_length": 6, "chunk_length": 8, "chunks": 2, "single": 5},
    "triplet": {"query_length": 6, "document_length": 16, "negatives": 2, "accumulation": 1},
}


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path))
    tiny_corpus.install(monkeypatch)
    model = tiny.model(head=True)
    return backbone.save(model, tiny.tokenizer(), tmp_path / "start", stage="tiny", fingerprint="tiny")


def job(stage, start, tmp_path, **more):
    changes = {f"{stage}.{key}": value for key, value in (TINY | OWN[stage]).items()}
    values = resolved(load_preset("smoke", changes))
    return {
        "values": values,
        "stage": stage,
        "folder": str(tmp_path / stage),
        "fingerprint": "x",
        "start": str(start),
        **more,
    }


@pytest.mark.parametrize("stage", ["diffusion", "pair", "contextual"])
def test_a_stage_trains_and_says_what_it_read(stage, start, tmp_path):
    rows = []
    model = run_job(job(stage, start, tmp_path), rows.append)
    assert [row["step"] for row in rows if "step" in row] == [0, 1]
    report = data_report(model)
    assert report == json.loads((tmp_path / stage / "data.json").read_text())
    if stage == "diffusion":
        (text,) = report
        assert (text["source"], text["blocks"], text["texts"]) == ("environment", 8, len(tiny_corpus.TEXTS))
    else:
        by_name = {row["data set"]: row for row in report}
        queries = [row["query"] for row in tiny_corpus.PAIRS]
        cut = sum(len(ids) > 6 for ids in tokenize(tiny.tokenizer(), queries, 99))
        if stage == "pair":
            assert by_name["docs"]["rows"] == 60 and by_name["docs"]["texts cut"] >= cut > 0
        else:
            assert by_name["docs"]["rows"] == 5
            assert by_name["counting"]["rows"] == 60  # every document has three chunks, in windows of two


def test_triplets_are_mined_ones_and_those_of_the_corpus(start, tmp_path):
    mined = [row | {"negatives": ["Number 7", "Number 8", "Number 9"]} for row in tiny_corpus.PAIRS]
    path = tmp_path / "negatives.parquet"
    Dataset.from_list(mined).to_parquet(path)
    rows = []
    model = run_job(job("triplet", start, tmp_path, negatives=str(path)), rows.append)
    assert {row["dataset"] for row in rows if "step" in row} == {"docs"}
    assert [(row["data set"], row["rows"]) for row in data_report(model)] == [("docs", 60)]


@pytest.mark.parametrize("stage", ["pair", "contextual"])
def test_a_stage_trains_on_look_alikes(stage, start, tmp_path):
    """Found before the training, from the data's own words or with an embedder, and kept."""
    random = job(stage, start, tmp_path)
    own = job(stage, start, tmp_path, changes={"cluster_size": 8, "filter_margin": 0.0})
    embedded = own | {"surrogate": str(start)}
    prepared = tmp_path / "data" / "prepared"
    for one in (own, embedded):
        prepare_data(one)
        before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*.bin")}
        rows = []
        run_job(one, rows.append)
        assert [row["step"] for row in rows if "step" in row] == [0, 1]
        assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*.bin")} == before
    fingerprints = [fingerprint(job_identity(one)) for one in (random, own, embedded)]
    assert len(set(fingerprints)) == 3
    assert fingerprint(job_identity(random | {"surrogate": str(start)})) == fingerprints[0]


def test_any_embedder_of_sentence_transformers_is_a_surrogate(start, tmp_path):
    path = tmp_path / "embedder"
    Embedder.from_pretrained(start).save_pretrained(path)
    (path / "unmask.json").unlink()  # no longer one of ours
    whole = {"query_length": 99, "document_length": 200}
    peer = SentenceTransformer(str(path))
    for batch in drawn_batches(job("pair", start, tmp_path, changes=whole, surrogate=str(path)), 2):
        rows = [tiny_corpus.PAIRS[row] for row in batch["rows"]]
        q_ND, d_ND = (
            peer.encode([row[side] for row in rows], normalize_embeddings=True)
            for side in ("query", "document")
        )
        others = (q_ND @ d_ND.T)[~np.eye(len(rows), dtype=bool)]
        assert batch["similarity"] == pytest.approx(others.mean(), abs=1e-3)


def test_what_was_prepared_before_is_not_tokenised_again(start, tmp_path):
    one = job("pair", start, tmp_path)
    report = prepare_data(one)
    prepared = tmp_path / "data" / "prepared"
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*.bin")}
    assert before
    assert data_report(run_job(one, lambda row: None)) == report
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*.bin")} == before


def test_one_group_of_pairs_only(start, tmp_path):
    with pytest.raises(ValueError, match="no training data"):
        run_job(job("pair", start, tmp_path, groups=["code"]), lambda row: None)


def test_a_last_token_is_the_same_for_all_texts(start, tmp_path):
    changes = {"pooling": "last", "query_length": 8, "document_length": 16}
    path = run_job(job("pair", start, tmp_path, changes=changes), lambda row: None)
    embedder = Embedder.from_pretrained(path)
    assert (embedder.pooling, embedder.special_tokens) == ("last", True)
    long = " ".join(tiny.TEXTS)
    for text in (*tiny.TEXTS[:3], long):  # a text that is cut keeps its end, too
        (unit,) = embedder._texts([text], 16, str)
        assert unit.sequence.tokens_L[-1] == tiny.tokenizer().eos_token_id
    by_mean = run_job(job("pair", start, tmp_path), lambda row: None)
    assert not Embedder.from_pretrained(by_mean).special_tokens


@pytest.mark.parametrize(("stage", "pooling"), [("qwen3", "mean"), ("qwen3", "last"), ("pair", "last")])
def test_who_pools_at_the_end_and_qwen3_whatever_its_pooling_end_each_text(stage, pooling):
    values = resolved(load_preset("smoke", {f"{stage}.pooling": pooling}))
    job = Job({"values": values, "stage": stage})
    assert job.stage.ends(job.config)
    contextual = Job({"values": values, "stage": "contextual"})
    assert not contextual.stage.ends(contextual.config)


def test_a_causal_start_reads_both_sides_if_it_is_told_to(tmp_path, start):
    causal = backbone.save(
        tiny.model(bidirectional=False, head=True), tiny.tokenizer(), tmp_path / "causal", fingerprint="c"
    )
    opened = run_job(job("pair", causal, tmp_path, bidirectional=True), lambda row: None)
    assert backbone.sees_both_sides(backbone.load(opened))
    kept = run_job(job("pair", causal, tmp_path), lambda row: None)
    assert not backbone.sees_both_sides(backbone.load(kept))
    marks = [
        fingerprint(job_identity(job("pair", causal, tmp_path, **more)))
        for more in ({}, {"bidirectional": True})
    ]
    assert marks[0] != marks[1]


def test_what_differs_between_two_jobs_is_named(start, tmp_path):
    def differs(**more):
        one = job("pair", start, tmp_path)
        one, two = (job_identity(one | changed) for changed in ({}, more))
        return {name for name in one | two if one.get(name) != two.get(name)}

    other = backbone.save(tiny.model(head=True), tiny.tokenizer(), tmp_path / "other", fingerprint="other")
    assert differs() == set()
    assert differs(changes={"lr": 1.0}) == {"pair.lr"}
    assert differs(groups=["code"]) == {"groups"}
    assert differs(start=str(other)) == {"start"}
    near = differs(changes={"cluster_size": 8})
    assert near == {"pair.cluster_size", "surrogate", "clusters"}
