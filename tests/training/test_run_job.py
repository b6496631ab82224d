"""Jobs: the stages' data from a corpus of a few sentences, and trainings on it."""

import numpy as np
import pytest
import tiny_stages
from sentence_transformers import SentenceTransformer

import tiny
import tiny_corpus
from unmask.data.mining import negative_similarity
from unmask.models import backbone
from unmask.models.embedder import Embedder
from unmask.training.loop import data_report, job_identity, run_job, stage_of

OWN = {
    "diffusion": {"length": 16},
    "pair": {"query_length": 6, "document_length": 16, "curriculum": [1.0, 0.0, 0.0]},
    "contextual": {"query_length": 6, "chunk_length": 8, "chunks": 2, "single": 5},
    "triplet": {"query_length": 6, "document_length": 16, "negatives": 2, "accumulation": 1},
}


def job(stage, start, tmp_path, **more):
    return tiny_stages.job(stage, start, tmp_path / stage, OWN[stage], more)


def quiet(row):
    pass


READ = [
    ("diffusion", 0, {"environment": {"blocks": 8, "texts": len(tiny_corpus.TEXTS)}}),
    ("pair", 0, {"docs": {"rows": 60, "texts cut": 120}}),
    # Every document has three chunks, in windows of two.
    ("contextual", 0, {"docs": {"rows": 5}, "counting": {"rows": 60}}),
    ("triplet", 3, {"docs": {"rows": 60}}),
    ("triplet", 1, {"docs": {"rows": 60}}),  # fewer than the two that are wanted
]


@pytest.mark.parametrize(("stage", "negatives", "read"), READ)
def test_a_stage_trains_and_says_what_it_read(start, tmp_path, stage, negatives, read):
    more, rows = tiny_stages.mined(tmp_path, negatives) if negatives else {}, []
    report = data_report(run_job(job(stage, start, tmp_path, **more), rows.append))
    assert [row["step"] for row in rows if "step" in row] == [0, 1]
    found = {row.get("data set", row.get("source")): row for row in report}
    assert found.keys() == read.keys()
    for name, counts in read.items():
        assert found[name].items() >= counts.items()


def test_a_stage_trains_on_look_alikes_that_were_prepared_before(start, tmp_path):
    own = job("pair", start, tmp_path, changes={"cluster_size": 8, "filter_margin": 0.0})
    with pytest.raises(ValueError, match=r"set clusters\.surrogate"):
        stage_of(own).prepare()
    own, rows = own | {"surrogate": str(start)}, []
    report = stage_of(own).prepare()
    assert data_report(run_job(own, rows.append)) == report
    assert [row["step"] for row in rows if "step" in row] == [0, 1]


def test_any_embedder_of_sentence_transformers_is_a_surrogate(start, tmp_path):
    path = tmp_path / "embedder"
    Embedder.from_pretrained(start).save_pretrained(path)
    (path / "unmask.json").unlink()  # no longer one of ours
    whole = {"query_length": 99, "document_length": 200}
    peer = SentenceTransformer(str(path))
    asked = job("pair", start, tmp_path, changes=whole | {"cluster_size": 8}, surrogate=str(path))
    for name, drawn in map((stage := stage_of(asked)).plan, range(2)):
        rows = [tiny_corpus.PAIRS[row] for row in drawn]
        sides = ([row[side] for row in rows] for side in ("query", "document"))
        q_ND, d_ND = (peer.encode(texts, normalize_embeddings=True) for texts in sides)
        others = (q_ND @ d_ND.T)[~np.eye(len(rows), dtype=bool)]
        found = negative_similarity(stage.neighbours[name], drawn)
        assert found == pytest.approx(others.mean(), abs=1e-3)


def test_a_last_token_is_the_same_for_all_texts(start, tmp_path):
    changes = {"pooling": "last", "query_length": 8, "document_length": 16}
    embedder = Embedder.from_pretrained(run_job(job("pair", start, tmp_path, changes=changes), quiet))
    assert (embedder.pooling, embedder.special_tokens) == ("last", True)
    for text in (*tiny.TEXTS[:3], " ".join(tiny.TEXTS)):  # a text that is cut keeps its end, too
        (unit,) = embedder._texts([text], 16).units
        assert unit.sequence.tokens_L[-1] == tiny.tokenizer().eos_token_id
    by_mean = run_job(job("pair", start, tmp_path), quiet)
    assert not Embedder.from_pretrained(by_mean).special_tokens


def test_a_stage_knows_its_tokenizers_special_tokens(start, tmp_path):
    assert stage_of(job("diffusion", start, tmp_path)).mask_token_id == tiny_stages.MASK_ID
    assert stage_of(job("contextual", start, tmp_path)).stored.end == tiny.tokenizer().eos_token_id


def test_a_training_takes_the_place_of_an_earlier_one_whatever_files_that_had(start, tmp_path):
    path = run_job(job("pair", start, tmp_path), quiet)
    before = sorted(file.name for file in path.iterdir())
    (path / "of_another_version.json").touch()
    assert run_job(job("pair", start, tmp_path), quiet) == path
    assert sorted(file.name for file in path.iterdir()) == before
    assert not path.with_name(f".{path.name}.new").exists()


def test_a_causal_start_reads_both_sides_if_it_is_told_to(causal, tmp_path):
    for more in ({}, {"bidirectional": True}):
        path = run_job(job("pair", causal, tmp_path, **more), quiet)
        assert backbone.sees_both_sides(backbone.load(path)) == bool(more)


DIFFERENT = [
    ({}, set()),
    ({"changes": {"lr": 1.0}}, {"pair.lr"}),
    ({"groups": ["code"]}, {"groups"}),
    ({"surrogate": "org/model"}, set()),  # not asked
    ({"changes": {"cluster_size": 8}}, {"pair.cluster_size", "surrogate", "clusters"}),
    ({"start": "org/other"}, {"start"}),
    ({"negatives": "none.parquet"}, {"negatives"}),
    ({"milestones": [3]}, {"milestones"}),
    ({"bidirectional": True}, {"bidirectional"}),
    ({"late_chunking": False}, {"late_chunking"}),
]


@pytest.mark.parametrize(("more", "names"), DIFFERENT)
def test_what_differs_between_two_jobs_is_named(start, tmp_path, more, names):
    base = {"surrogate": str(start)}
    stage = "triplet" if "negatives" in more else "pair"
    asked = (job(stage, start, tmp_path, **base) | changed for changed in ({}, more))
    one, two = map(job_identity, map(stage_of, asked))
    assert {name for name in one | two if one.get(name) != two.get(name)} == names
