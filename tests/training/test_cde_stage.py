"""The stage of the contextual encoder: its batches, and two-stage caching against plain backpropagation."""

import pytest
import tiny_stages
import torch

import tiny
import tiny_corpus
from unmask.data import mining
from unmask.losses import pair_loss
from unmask.models import backbone
from unmask.models.context_encoder import ContextEmbedder, ContextualEncoder
from unmask.models.encoding import encode_rows, micro_batches
from unmask.models.quantize import int8
from unmask.training.distributed import ALONE
from unmask.training.loop import run_job, stage_of
from unmask.training.neighbours import Cde


def case(*, context=7, **changes):
    settings = tiny_stages.config("cde", **{"batch": 9, "context": context, **changes})
    model = ContextualEncoder(tiny.model(seed=1), tiny.model(seed=2), context)
    return settings, tiny_stages.stage("cde", settings, {"one": tiny_stages.pairs(12)}), model


def step(stage, model, batch):
    model.zero_grad()
    row = stage.backward(stage.module(model), batch, 0, ALONE)
    return float(row["loss"]), tiny.gradients(model)


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
    found_loss, found = step(stage, model, batch)
    # Through both stages at once: no micro-batch, no cache.
    model.zero_grad()
    context_KD = encode_rows(model.first, batch.context)[batch.kept]
    rows_RD = encode_rows(model.second, batch.sequences, context_KD=context_KD)
    rows_RD = int8(rows_RD) if quantize else rows_RD
    loss = pair_loss(rows_RD[:9], rows_RD[9:], temperature=settings.temperature, margin=settings.margin)
    loss.backward()
    expected = tiny.gradients(model)
    assert found_loss == pytest.approx(loss.item(), rel=1e-5)
    assert found.keys() == expected.keys()
    for part in ("first.", "second.", "second.null_D"):  # none hides behind another's size
        keys = [key for key in found if key.startswith(part)]
        norm = torch.stack([expected[key].norm() for key in keys]).norm()
        error = torch.stack([(found[key] - expected[key]).norm() for key in keys]).norm()
        assert norm > 0 and error <= 1e-5 * norm


@pytest.mark.parametrize(("context", "expected"), [(5, 5), (20, 9)])
def test_the_context_are_documents_of_the_batch_each_once(context, expected):
    _, stage, _ = case(context=context, sequence_dropout=0.0)
    drawn = []
    for number in range(8):
        batch = stage.batch(number)
        documents = [s.tokens_L[context:].tolist() for s in batch.sequences[9:]]
        where = [documents.index(c.tokens_L.tolist()) for c in batch.context]
        assert len(set(where)) == expected and batch.kept.tolist() == list(range(expected))
        drawn.append(tuple(sorted(where)))
    assert len(set(drawn)) > 4 or expected == 9


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path))
    tiny_corpus.install(monkeypatch)
    start = backbone.save(tiny.model(), tiny.tokenizer(), tmp_path / "start", fingerprint="tiny")
    values = {"query_length": 6, "document_length": 16, "cluster_size": 0, "filter_margin": -1.0}
    return tiny_stages.job("cde", start, tmp_path / "cde", values, {"groups": ["english"]})


def test_a_job_starts_both_stages_from_one_checkpoint_and_saves_what_the_embedder_loads(job):
    path = run_job(job, lambda row: None)
    assert backbone.facts(path) == {"stage": "cde", "pooling": "mean", "fingerprint": "x", "context": 4}
    embedder = ContextEmbedder.from_pretrained(path, device="cpu")
    before = backbone.load(job["start"]).state_dict()
    for model in (embedder.encoder.first, embedder.encoder.second.backbone):
        after = model.state_dict()
        assert any(not torch.equal(after[key], before[key]) for key in before)
        assert all(torch.allclose(after[key], before[key], atol=0.05) for key in before)
    found = embedder.with_context(["Number 7 is written with 1 digits."]).encode(["How is number 7 written?"])
    assert found.shape == (1, 32)


def test_without_context_a_job_trains_the_plain_encoder(job):
    assert isinstance(stage_of(job), Cde)
    plain = stage_of(job | {"changes": {"context": 0}})
    assert not isinstance(plain, Cde) and plain.config.context == 0


def test_a_cap_on_the_pairs_holds_with_and_without_context(job, monkeypatch):
    monkeypatch.setattr(mining, "FEWEST", 5)

    def drawn(**changes):
        stage = stage_of(job | {"changes": changes})
        return {name: (len(rows.queries), rows.identity) for name, rows in stage.data.items()}

    everything, capped = drawn(), drawn(max_pairs=20)
    assert drawn(max_pairs=10**6) == everything  # the same files of tokens
    assert drawn(max_pairs=20, context=0) == capped
    for name, (count, identity) in capped.items():
        assert count <= everything[name][0] and (identity == everything[name][1]) == (
            count == everything[name][0]
        )
    assert sum(count for count, _ in capped.values()) < sum(count for count, _ in everything.values())
