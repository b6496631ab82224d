"""The stage of the contextual encoder: its batches, and two-stage caching against plain backpropagation."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import tiny_stages
import torch
from tiny_stages import pairs

import tiny
import tiny_corpus
from unmask.config import load_preset, resolved
from unmask.losses import pair_loss
from unmask.models import backbone
from unmask.models.context_encoder import ContextEmbedder, ContextualEncoder
from unmask.models.embedder import Embedder
from unmask.models.encoding import encode_rows, micro_batches
from unmask.models.quantize import int8
from unmask.training.distributed import ALONE
from unmask.training.loop import data_report, run_job
from unmask.training.neighbours import Cde


def case(*, context=7, **changes):
    settings = tiny_stages.config("cde", **{"batch": 9, "context": context, **changes})
    model = ContextualEncoder(tiny.model(seed=1), tiny.model(seed=2), context)
    return settings, Cde({"one": pairs(12)}, settings), model


def step(stage, model, batch):
    model.zero_grad()
    row = stage.backward(stage.module(model), batch, 0, ALONE)
    return float(row["loss"]), tiny.gradients(model)


def plain(settings, model, batch):
    """Backpropagation through both stages at once: no micro-batch, no cache."""
    model.zero_grad()
    context_KD = encode_rows(model.first, batch.context)[batch.kept]
    rows_RD = encode_rows(model.second, batch.sequences, context_KD=context_KD)
    rows_RD = int8(rows_RD) if settings.quantize else rows_RD
    n = len(rows_RD) // 2
    loss = pair_loss(
        rows_RD[:n], rows_RD[n:], temperature=settings.temperature, margin=settings.margin,
        negatives_NN=batch.negatives,
    )  # fmt: skip
    loss.backward()
    return loss.item(), tiny.gradients(model)


def assert_same(found, expected):
    (loss, gradients), (expected_loss, expected_gradients) = found, expected
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for stage in ("first.", "second.", "second.null_D"):  # none hides behind another's size
        keys = [key for key in gradients if key.startswith(stage)]
        norm = torch.stack([expected_gradients[key].norm() for key in keys]).norm()
        error = torch.stack([(gradients[key] - expected_gradients[key]).norm() for key in keys]).norm()
        assert norm > 0 and error <= 1e-5 * norm


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(("context", "dropout"), [(7, 0.4), (12, 0.0)])
def test_two_stage_caching_equals_plain_backpropagation(context, dropout, quantize):
    settings, stage, model = case(
        context=context, sequence_dropout=dropout, quantize=quantize, token_budget=30
    )
    batch = stage.batch(0)
    assert (len(batch.kept) < len(batch.context)) == (dropout > 0)
    for sequences in (batch.context, batch.sequences):
        assert len(micro_batches([len(s) for s in sequences], settings.token_budget)) >= 3
    assert_same(step(stage, model, batch), plain(settings, model, batch))


def test_a_step_whose_context_is_dropped_altogether_teaches_the_null_vector():
    _, stage, model = case(sequence_dropout=0.4)
    batch = replace(stage.batch(0), kept=np.array([], int))
    _, gradients = step(stage, model, batch)
    assert all(gradients[key].norm() == 0 for key in gradients if key.startswith("first."))
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert gradients["second.null_D"].norm() > 0


def test_the_context_are_documents_of_the_batch_each_once():
    _, stage, _ = case(context=5, sequence_dropout=0.0)
    drawn = []
    for number in range(8):
        batch = stage.batch(number)
        documents = [s.tokens_L[5:].tolist() for s in batch.sequences[9:]]
        where = [documents.index(c.tokens_L.tolist()) for c in batch.context]
        assert len(set(where)) == 5 and batch.kept.tolist() == list(range(5))
        drawn.append(tuple(sorted(where)))
    assert len(set(drawn)) > 4
    _, stage, _ = case(context=20, sequence_dropout=0.0)
    batch = stage.batch(0)
    assert sorted(c.tokens_L.tolist() for c in batch.context) == sorted(
        s.tokens_L[20:].tolist() for s in batch.sequences[9:]
    )


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path))
    tiny_corpus.install(monkeypatch)
    return backbone.save(tiny.model(), tiny.tokenizer(), tmp_path / "start", fingerprint="tiny")


def job(start, folder, **changes):
    values = {
        "steps": 3, "batch": 8, "warmup": 0, "decay": 0, "precision": "fp32", "compile": False,
        "query_length": 6, "document_length": 16, "context": 4, "cluster_size": 0, "filter_margin": -1.0,
    }  # fmt: skip
    overrides = {f"cde.{key}": value for key, value in values.items()} | {"cde.context_sizes": [0, 4]}
    return {
        "values": resolved(load_preset("smoke", overrides)), "stage": "cde", "folder": str(folder),
        "fingerprint": "x", "start": str(start), "groups": ["english"], "changes": changes,
    }  # fmt: skip


def test_a_job_starts_both_stages_from_one_checkpoint_and_saves_what_the_embedder_loads(start, tmp_path):
    rows = []
    path = run_job(job(start, tmp_path / "cde"), rows.append)
    assert backbone.facts(path) == {"stage": "cde", "pooling": "mean", "fingerprint": "x", "context": 4}
    assert [row["pairs"] for row in rows if "pairs" in row] == [8, 8, 8]
    assert data_report(path)[0]["data set"] == "docs"
    embedder = ContextEmbedder.from_pretrained(path, device="cpu")
    before = backbone.load(start).state_dict()
    for model in (embedder.encoder.first, embedder.encoder.second.backbone):
        after = model.state_dict()
        assert any(not torch.equal(after[key], before[key]) for key in before)
        assert all(torch.allclose(after[key], before[key], atol=0.05) for key in before)
    found = embedder.with_context(["Number 7 is written with 1 digits."]).encode(["How is number 7 written?"])
    assert found.shape == (1, 32)


def test_without_context_a_job_trains_the_plain_encoder_as_the_pair_stage_does(start, tmp_path):
    plain_job = job(start, tmp_path / "plain", context=0)
    path = run_job(plain_job, lambda row: None)
    pair_job = copy.deepcopy(plain_job) | {"stage": "pair", "folder": str(tmp_path / "pair"), "changes": {}}
    section = plain_job["values"]["cde"]
    pair_job["values"]["pair"] = {key: section[key] for key in pair_job["values"]["pair"]}
    expected = Embedder.from_pretrained(run_job(pair_job, lambda row: None), device="cpu")
    texts = ["How is number 7 written?", "Number 8"]
    found = Embedder.from_pretrained(path, device="cpu").encode(texts, "float32")
    np.testing.assert_array_equal(found, expected.encode(texts, "float32"))
