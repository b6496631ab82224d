"""The presets that read the Hub, on made-up rows in the documented schemas: every stage finds what it reads.
All notebooks, on one process and on two: `make rehearse`."""

import re

import pytest
from joblib.externals.loky import get_reusable_executor

import rehearsal
from unmask.__main__ import main
from unmask.config import TRAINED, load_preset
from unmask.data import mirror, reading, tokenized
from unmask.data.sources import open_corpus
from unmask.evaluation import conteb
from unmask.evaluation.tasks import build_tasks
from unmask.models.backbone import load_tokenizer
from unmask.training import STAGES


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("rehearsal")
    rehearsal.prepare(made)
    return made


@pytest.fixture(params=["hub-0.6b", "hub-135m"])
def preset(request, folder, monkeypatch):
    monkeypatch.setenv("UNMASK_MIRROR", str(folder / "mirror"))
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(folder / "artifacts"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "cache")
    get_reusable_executor().shutdown()  # workers of an earlier test know no mirror
    return load_preset(request.param, rehearsal.SMALL)


def test_every_stage_and_every_task_finds_what_it_reads(preset):
    mirror.require(preset)
    corpus = open_corpus(preset.data)
    for split in ("dev", "test"):
        assert len(build_tasks(corpus, split, preset.evaluation)) > 6
    assert [len(conteb.load(task).queries) > 0 for task in preset.conteb.tasks] == [True] * 8
    tokenizer = load_tokenizer(preset.backbone.checkpoint)
    for name in TRAINED[1:]:  # the backbone is a ready checkpoint
        if name == "cde" and not preset.clusters.surrogate:
            continue  # its notebook takes the pair stage's model
        # Every data set but for CDE, whose surrogate reads all texts.
        stage = STAGES[name](preset, corpus, tokenizer, only=["code"] * (name == "cde"))
        report = stage.prepare()
        assert all(row.get("rows", 1) for row in report), name
        assert stage.batch(0)
        if name == "triplet":  # a set of one negative each, beside sets of three and more
            found = {name: len(rows.negatives[0]) for name, rows in stage.data.items()}
            assert found == {name: 1 if name == "all-nli" else 3 for name in found}


@pytest.mark.parametrize("preset", ["hub-0.6b"], indirect=True)
def test_what_was_prepared_without_a_gpu_is_what_trainings_read(preset, monkeypatch, capfd):
    assert main(["prepare", "--preset", "hub-0.6b", *rehearsal.told(rehearsal.SMALL)]) == 0
    assert re.search("pair: data set paq, .*rows 12", capfd.readouterr().out)
    corpus, tokenizer = open_corpus(preset.data), load_tokenizer(preset.backbone.checkpoint)
    monkeypatch.setattr(tokenized, "encode", None)  # nothing is tokenised any more
    monkeypatch.setattr(reading, "data_files", None)  # and no process asks the Hub what there is
    for name in ("diffusion", "pair", "contextual", "triplet", "qwen3"):
        more = {"negatives": 0} if name == "qwen3" else {}
        assert STAGES[name](preset, corpus, tokenizer, **more).prepare()
