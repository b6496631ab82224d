"""Trainings in this process: what a stage reads of a few sentences, and which training is which."""

import copy
import gc
import logging
import re
import signal
from functools import partial

import numpy as np
import pytest
import tiny_stages
import torch
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, BertModel

import tiny
import tiny_corpus
import tiny_families
from unmask import Embedder, losses
from unmask.config import ConfigError
from unmask.data.mining import negative_similarity
from unmask.models import backbone
from unmask.store import write_atomic
from unmask.training import Pair, TrainingStopped, data_report, history, train
from unmask.training import identity as same
from unmask.training.identity import identity, outside_code

OWN = {
    "diffusion": {"length": 16},
    "pair": {"query_length": 6, "document_length": 16, "curriculum": [1.0, 0.0, 0.0]},
    "contextual": {"query_length": 6, "chunk_length": 8, "chunks": 2, "single": 5},
    "triplet": {"query_length": 6, "document_length": 16, "negatives": 2, "accumulation": 1},
}


def made(section, start, **more):
    return tiny_stages.on_the_corpus(section, start, **OWN[section] | more)


def trained(stage, start, folder, **options):
    return train(stage, stage.model(start), folder, **options)


READ = [
    ("diffusion", 0, {"environment": {"blocks": 8, "texts": len(tiny_corpus.TEXTS)}}),
    ("pair", 0, {"docs": {"rows": 60, "texts cut": 120}}),
    # Every document has three chunks, in windows of two.
    ("contextual", 0, {"docs": {"rows": 5}, "counting": {"rows": 60}}),
    ("triplet", 3, {"docs": {"rows": 60}}),
    ("triplet", 1, {"docs": {"rows": 60}}),  # fewer than the two that are wanted
]


@pytest.mark.parametrize(("section", "negatives", "read"), READ)
def test_a_stage_trains_and_says_what_it_read(start, tmp_path, section, negatives, read, capsys):
    more = {"mined": tiny_stages.mined(tmp_path, negatives)} if negatives else {}
    path = trained(made(section, start, **more), start, tmp_path / section)
    assert [row["step"] for row in history(path)] == [0, 1]
    found = {row.get("data set", row.get("source")): row for row in data_report(path)}
    assert found == {name: found[name] | counts for name, counts in read.items()}
    cut = sum(row.get("tokens cut", 0) for row in found.values())
    share = cut / (cut + sum(row["tokens"] for row in found.values()))
    assert (f", {cut:,} tokens cut" in (said := capsys.readouterr().out)) == (cut > 0)
    assert not cut or f"({share:.1%} of all)" in said


SHOWN = {
    "diffusion": r"^ *\d+% masked  .*▒",
    "pair": r"query     How is number .*written\?\ndocument  Number",
    "contextual": r"chunk  0  Number .*\nchunk  1  Then comes .*\nquery     What comes after .* \(chunk 1\)",
    "triplet": r"document  Number .*\nnegative  Number 7\?\nnegative  Number 8",
}


@pytest.mark.parametrize("section", SHOWN)
def test_a_stage_shows_its_batch(start, tmp_path, capsys, section):
    long = {"query_length": 60, "document_length": 60, "chunk_length": 40, "single": 0, "length": 64}
    more = {key: value for key, value in long.items() if key in OWN[section]}
    made(section, start, mined=tiny_stages.mined(tmp_path), **more).show(0)
    assert re.search(SHOWN[section], capsys.readouterr().out, re.MULTILINE)


def test_look_alikes_are_prepared_before_the_training(start, tmp_path):
    alike = partial(made, "pair", start, cluster_size=8, filter_margin=0.0)
    with pytest.raises(ValueError, match=r"set clusters\.surrogate"):
        alike().prepare()
    report = (stage := alike(surrogate=start)).prepare()
    assert data_report(trained(stage, start, tmp_path / "pair")) == report


def test_any_embedder_of_sentence_transformers_is_a_surrogate(start, tmp_path):
    path = Embedder.from_pretrained(start).save_pretrained(tmp_path / "embedder")
    (path / "unmask.json").unlink()  # no longer one of ours
    peer = SentenceTransformer(str(path))
    whole = {"query_length": 99, "document_length": 200, "cluster_size": 8}
    stage = made("pair", start, surrogate=path, **whole)
    for name, drawn in map(stage.plan, range(2)):
        sides = ([tiny_corpus.PAIRS[row][side] for row in drawn] for side in ("query", "document"))
        q_ND, d_ND = (peer.encode(texts, normalize_embeddings=True) for texts in sides)
        others = (q_ND @ d_ND.T)[~np.eye(len(drawn), dtype=bool)].mean()
        assert negative_similarity(stage.neighbours[name], drawn) == pytest.approx(others, abs=1e-3)


def test_a_last_token_is_the_same_for_all_texts(start, tmp_path):
    last = made("pair", start, pooling="last", query_length=8, document_length=16)
    embedder = Embedder.from_pretrained(trained(last, start, tmp_path / "last"))
    assert (embedder.pooling, embedder.special_tokens) == ("last", True)
    for text in (*tiny.TEXTS[:3], " ".join(tiny.TEXTS)):  # a text that is cut keeps its end, too
        (unit,) = embedder._texts([text], 16).units
        assert unit.sequence.tokens_L[-1] == tiny.tokenizer().eos_token_id
    by_mean = trained(made("pair", start), start, tmp_path / "mean")
    assert not Embedder.from_pretrained(by_mean).special_tokens


def test_a_stage_knows_its_special_tokens_and_reads_both_sides_if_told(start, causal):
    assert made("diffusion", start).mask_token_id == tiny_stages.MASK_ID
    assert made("contextual", start).stored.end == tiny.tokenizer().eos_token_id
    for told in (False, True):
        assert backbone.sees_both_sides(made("pair", causal, bidirectional=told).model(causal)) == told


def test_what_a_model_cannot_read_is_refused_before_a_step(start, tmp_path):
    with pytest.raises(ConfigError, match=r"pair\.document_length is 300, the model has 256 positions"):
        made("pair", start, document_length=300).model(start)
    stage, larger = made("pair", start), copy.deepcopy(tiny.tokenizer())
    larger.add_tokens(["[NEWTOKEN]"])
    stage.tokenizer = larger
    with pytest.raises(ValueError, match=r"'\[NEWTOKEN\]' has the number 400, .* rows for 400 tokens"):
        stage.model(start)


DIFFERENT = [
    ({}, set()),
    ({"lr": 1.0}, {"pair.lr"}),
    ({"token_budget": 7}, set()),  # how it is computed
    ({"only": ["code"]}, {"only"}),
    ({"surrogate": "org/model"}, set()),  # not asked
    ({"cluster_size": 8}, {"pair.cluster_size", "surrogate", "clusters"}),
    ({"mined": "none.parquet"}, {"mined"}),
    ({"milestones": [3]}, {"milestones"}),
    ({"bidirectional": True}, {"bidirectional", "weights"}),
    ({"late_chunking": False}, {"late_chunking"}),
]


@pytest.mark.parametrize(("more", "names"), DIFFERENT)
def test_what_differs_between_two_trainings_is_named(start, causal, more, names):
    stages = [made("pair", start, **{"surrogate": start} | one) for one in ({}, more)]
    one, two = (identity(stage, stage.model(causal)) for stage in stages)
    assert {name for name in one | two if one.get(name) != two.get(name)} == names


class Mine(Pair):
    """A stage of one's own, as a notebook defines it."""

    scale = 2

    def loss(self, rows_RD, batch, **shared):
        return self.scale * super().loss(rows_RD, batch, **shared)


def halved(*rows, **shared):
    return losses.contrastive.pair_loss(*rows, **shared) / 2


def test_code_outside_of_the_library_is_named_with_its_source(start, monkeypatch):
    def code(kind=Pair):
        return outside_code(made("pair", start, kind=kind))

    first = code(Mine)
    assert first["Mine.scale"] == "2" and "return self.scale * super().loss" in first["Mine.loss"]
    monkeypatch.setattr(Mine, "scale", 3)
    assert code() == {} and code(Mine) | {"Mine.scale": "2"} == first
    monkeypatch.setattr(losses, "pair_loss", halved)
    assert "pair_loss(*rows, **shared) / 2" in code()["pair_loss"]
    monkeypatch.setattr(losses, "pair_loss", partial(losses.contrastive.pair_loss, margin=0.3))
    assert "margin: float" in code()["pair_loss"] and "{'margin': 0.3}" in code()["pair_loss"]
    stage = made("pair", start)
    stage.loss = halved
    assert outside_code(stage)["loss"] == outside_code(stage)["loss"] != ""
    stage.loss = eval("lambda rows_RD, batch: 0")
    with pytest.raises(ValueError, match="<lambda> has no source: define it in a cell or in a file"):
        outside_code(stage)


def test_another_value_trains_beside_and_the_first_is_found_again(start, tmp_path, capsys):
    folder, stage = tmp_path / "pair", made("pair", start)
    first, other = trained(stage, start, folder), trained(made("pair", start, lr=0.5), start, folder)
    assert first != other == (folder / "model").resolve()
    model = stage.model(start)
    assert train(stage, model, folder) == first == (folder / "model").resolve()
    assert capsys.readouterr().out.count("trained before") == 1
    saved = backbone.load(first).state_dict()
    assert all(torch.equal(saved[key], value) for key, value in model.state_dict().items())


def test_a_changed_file_of_the_library_asks_for_a_new_kernel(start, tmp_path, monkeypatch):
    file = write_atomic(tmp_path / "unmask" / "losses" / "mine.py", "rate = 2\n")
    monkeypatch.setattr(same, "LIBRARY", tmp_path / "unmask")
    monkeypatch.setattr(same, "IMPORTED", {file: b"rate = 1\n"})
    with pytest.raises(RuntimeError, match=r"unmask/losses/mine.py has changed .*: restart the kernel"):
        trained(made("pair", start), start, tmp_path / "pair")


def test_what_another_library_made_is_taken_but_in_a_run_made_anew(start, tmp_path, monkeypatch, capsys):
    def again(mode):
        if mode:
            monkeypatch.setenv("UNMASK_CODE", mode)
        return trained(made("pair", start), start, tmp_path / "pair")

    first = again("")
    monkeypatch.setattr(same, "library_hash", lambda: "other")
    assert again("") == first
    assert re.search(r"made by another library \(\w+\); delete it to train anew", capsys.readouterr().out)
    assert again("accept") == first
    other = again("ask")
    assert other != first and first.is_dir() and again("accept") == other
    monkeypatch.setattr(same, "library_hash", lambda: "newer")
    assert again("accept") == other  # the last one


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_same_call_goes_on(start, tmp_path, monkeypatch, number):
    """What a GPU held is given back."""
    stage, left = made("pair", start, steps=6), []
    optimizers = partial(filter, lambda one: isinstance(one, torch.optim.AdamW))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: left.append([*optimizers(gc.get_objects())]))
    with pytest.raises(TrainingStopped, match="4 steps are saved"):
        trained(stage, start, tmp_path / "parts", watch=tiny_stages.Reported(2, number))
    assert left == [[]]
    parts = trained(stage, start, tmp_path / "parts", watch=(watch := tiny_stages.Reported()))
    assert watch.rows[0] == {"total": 6, "done": 4}
    whole = trained(stage, start, tmp_path / "whole")
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert not (parts.parent / "checkpoints").exists()


def test_two_processes_never_train_in_one_folder(start, tmp_path):
    class Meanwhile(tiny_stages.Reported):
        def __call__(self, row):
            with pytest.raises(RuntimeError, match="another process works on"):
                trained(made("pair", start), start, tmp_path / "pair")

    trained(made("pair", start), start, tmp_path / "pair", watch=Meanwhile())


def test_a_training_leaves_no_trace_in_its_process(start, tmp_path):
    stage = made("pair", start, gradient_checkpointing=True)
    model = stage.model(start)
    before, kernel = torch.random.get_rng_state(), model.config._attn_implementation
    train(stage, model, tmp_path / "pair")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert model.config._attn_implementation == kernel
    assert not any(layer.gradient_checkpointing for layer in backbone.layers(model))
    assert not model.training and all(weight.grad is None for weight in model.parameters())
    model.get_input_embeddings()(torch.tensor([[1]])).sum().backward()
    assert not model.get_input_embeddings().weight.grad.is_sparse


EMBEDDERS = ("pair", "contextual", "triplet", "qwen3")


@pytest.mark.parametrize("family", ["decoder", "BERT"])
@pytest.mark.parametrize("section", EMBEDDERS)
def test_what_a_stage_trains_is_a_model_of_sentence_transformers(start, tmp_path, section, family, caplog):
    """It says nothing at a load, of a BERT's unread pooler neither, and gives the vectors that we give."""
    if family == "BERT":
        bert = BertModel(BertConfig(vocab_size=len(tiny.tokenizer()), **tiny_families.SHAPE))
        start = backbone.save(bert, tiny.tokenizer(), tmp_path / "bert")
    last = {"query_length": 60, "document_length": 60, "negatives": 2, "dimensions": [32]}
    own = OWN.get(section, last) | {"mined": tiny_stages.mined(tmp_path)}
    path = trained(tiny_stages.on_the_corpus(section, start, **own), start, tmp_path / section)
    logging.getLogger("transformers").addHandler(caplog.handler)  # which hands nothing on
    theirs = SentenceTransformer(str(path), device="cpu").encode(tiny.TEXTS[:5])
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert not caplog.messages
    ours = Embedder.from_pretrained(path, device="cpu").encode(tiny.TEXTS[:5], "float32")
    np.testing.assert_allclose(theirs, ours, atol=1e-5)
