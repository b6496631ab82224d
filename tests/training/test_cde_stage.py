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
from unmask.training.jobs import data_report, run_job
from unmask.training.loop import train
from unmask.training.neighbours import Cde
from unmask.training.stages import Pair


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
        negatives_NN=batch.negatives_NN,
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


def test_false_negatives_of_the_surrogate_are_left_out():
    settings, stage, model = case(token_budget=30, sequence_dropout=0.4)
    batch = stage.batch(0)
    negatives_NN = torch.rand(9, 9, generator=torch.Generator().manual_seed(0)) < 0.5
    masked = replace(batch, negatives_NN=negatives_NN | torch.eye(9, dtype=torch.bool))
    found = step(stage, model, masked)
    assert found[0] < step(stage, model, batch)[0]
    assert_same(found, plain(settings, model, masked))


def test_dropout_is_replayed_in_both_stages():
    settings, stage, model = case(token_budget=30, sequence_dropout=0.4, quantize=False)
    for network in (model.first, model.second.backbone):
        for layer in network.layers:
            layer.self_attn.attention_dropout = 0.3
        network.config.attention_dropout = 0.3
    model.train()
    batch = stage.batch(0)
    torch.manual_seed(0)
    found = step(stage, model, batch)
    after = torch.get_rng_state()

    def embed(network, sequences, **inputs):  # the same random numbers, with a graph all along
        groups = micro_batches([len(s) for s in sequences], settings.token_budget)[::-1]
        parts = [encode_rows(network, [sequences[i] for i in group], **inputs) for group in groups]
        return torch.cat(parts)[torch.from_numpy(np.concatenate(groups).argsort())]

    model.zero_grad()
    torch.manual_seed(0)
    context_KD = embed(model.first, batch.context)[batch.kept]
    rows_RD = embed(model.second, batch.sequences, context_KD=context_KD)
    loss = pair_loss(rows_RD[:9], rows_RD[9:], temperature=settings.temperature, margin=settings.margin)
    loss.backward()
    assert torch.equal(after, torch.get_rng_state())
    assert_same(found, (loss.item(), tiny.gradients(model)))


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


def test_context_documents_are_dropped_with_the_probability_configured():
    _, stage, _ = case(sequence_dropout=0.3, steps=300)
    kept = [batch.kept for batch in map(stage.batch, range(300))]
    share = np.mean([len(k) for k in kept]) / 7
    assert share == pytest.approx(0.7, abs=4 * (0.21 / 2100) ** 0.5)
    assert {i for k in kept for i in k} == set(range(7))


def test_only_the_context_is_added_to_the_pairs_batches():
    settings, stage, _ = case()
    pair = Pair({"one": pairs(12)}, settings)
    for number in range(4):
        ours, theirs = stage.batch(number), pair.batch(number)
        assert stage.samples(number) == pair.samples(number)
        assert [s.tokens_L[7:].tolist() for s in ours.sequences] == [
            s.tokens_L.tolist() for s in theirs.sequences
        ]


def test_gradient_checkpointing_changes_memory_not_the_weights(tmp_path):
    trained = []
    for recomputed in (False, True):
        settings, stage, model = case(steps=3, gradient_checkpointing=recomputed)
        train(stage, model, settings, tmp_path / str(recomputed), fingerprint="a")
        assert model.first.is_activation_checkpointing == model.second.backbone.is_activation_checkpointing
        assert model.first.is_activation_checkpointing == recomputed
        trained.append(model)
    for one, two in zip(*(model.parameters() for model in trained), strict=True):
        torch.testing.assert_close(one, two)


def test_both_stages_layers_are_found():
    """What is compiled, and what FSDP2 divides."""
    _, _, model = case()
    assert list(backbone.layers(model)) == [*model.first.layers, *model.second.backbone.layers]
    head = tiny.model(head=True)
    assert list(backbone.layers(head)) == list(head.model.layers)


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
