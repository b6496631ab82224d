"""The presets that read the Hub, on made-up rows in the documented schemas: every stage finds what it reads.
All notebooks, on one process and on two: `make rehearse`."""

import re

import pytest
from joblib.externals.loky import get_reusable_executor

import rehearsal
from toy_checkout import unmask
from unmask.data import rows, tokenize
from unmask.data.sources import open_corpus
from unmask.models.backbone import load_tokenizer
from unmask.training import STAGES
from unmask_study import conteb, mirror
from unmask_study.settings import load_preset
from unmask_study.tasks import build_tasks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("rehearsal")
    rehearsal.prepare(made)
    get_reusable_executor().shutdown()  # workers of an earlier test know no mirror
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hub-0.6b", "hub-135m"])
def test_stages_and_tasks_find_what_they_read_and_trainings_read_what_was_prepared(name, folder, monkeypatch):
    monkeypatch.setenv("UNMASK_MIRROR", str(folder / "mirror"))
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(folder / "artifacts"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    preset = load_preset(name, rehearsal.SMALL)
    mirror.require(preset, mirror.PARTS)
    prepared = unmask("prepare", "--preset", name, *rehearsal.told(rehearsal.SMALL))
    assert prepared.returncode == 0 and re.search("pair: data set .*rows 12", prepared.stdout)

    corpus, tokenizer = open_corpus(preset.data), load_tokenizer(preset.backbone.checkpoint)
    for split in ("dev", "test"):
        assert len(build_tasks(corpus, split, preset.evaluation)) > 6
    assert [len(conteb.load(task).queries) > 0 for task in preset.conteb.tasks] == [True] * 8

    def stage(name, **more):
        made = STAGES[name](preset, corpus, tokenizer, **more)
        assert all(row.get("rows", 1) for row in made.prepare()), name
        assert made.batch(0)
        return made

    stage("qwen3"), stage("reranker")
    if preset.clusters.surrogate:  # which reads all texts; else notebook 10 takes the pair stage's model
        stage("cde", only=["code"])
    if name == "hub-135m":  # it wants more text than there is, so that the files are listed again
        stage("diffusion")
    monkeypatch.setattr(tokenize, "encode", None)  # nothing is tokenised any more
    monkeypatch.setattr(rows, "data_files", None)  # and no process asks the Hub what there is
    stage("pair"), stage("contextual"), stage("qwen3", negatives=0)
    if name == "hub-0.6b":
        stage("diffusion")
    # A set of one negative each, beside sets of three and more.
    found = {name: len(rows.negatives[0]) for name, rows in stage("triplet").data.items()}
    assert found == {name: 1 if name == "all-nli" else 3 for name in found}
