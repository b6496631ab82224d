"""The stage of the contextual encoder: its batches, and two-stage caching against plain backpropagation."""

import pytest
import tiny_stages
import torch
from tiny_stages import backpropagated, difference, step

import tiny
from unmask.data import mining
from unmask.losses import pair_loss
from unmask.models import backbone
from unmask.models.context_encoder import ContextEmbedder, ContextualEncoder
from unmask.models.encoding import encode_rows, micro_batches
from unmask.models.quantize import int8
from unmask.training import Pair, train


@pytest.mark.parametrize("quantize", [True, False])
@pytest.mark.parametrize(("context", "dropout"), [(7, 0.4), (12, 0.0)])
def test_two_stage_caching_equals_plain_backpropagation(context, dropout, quantize):
    changes = {"context": context, "sequence_dropout": dropout, "quantize": quantize}
    stage = tiny_stages.stage("cde", {"one": tiny_stages.pairs(12)}, batch=9, token_budget=30, **changes)
    model = ContextualEncoder(tiny.model(seed=1), tiny.model(seed=2), context)
    config, [batch] = stage.config, stage.batch(0)
    assert (len(batch.visible) < len(batch.context)) == (dropout > 0)
    for sequences in (batch.context, batch.sequences):
        assert len(micro_batches([len(s) for s in sequences], config.token_budget)) >= 3
    found_loss, found = step(stage, model, [batch])
    # Through both stages at once: no micro-batch, no cache.
    context_KD = encode_rows(model.first, batch.context)[batch.visible]
    rows_RD = encode_rows(model.second, batch.sequences, context_KD=context_KD)
    rows_RD = int8(rows_RD) if quantize else rows_RD
    loss = pair_loss(rows_RD[:9], rows_RD[9:], temperature=config.temperature, margin=config.margin)
    expected_loss, expected = backpropagated(loss, model)
    assert found_loss == pytest.approx(expected_loss, rel=1e-5)
    for part in ("first.", "second.", "second.null_D"):  # none hides behind another's size
        of_part = {key: gradient for key, gradient in expected.items() if key.startswith(part)}
        assert difference({key: found[key] for key in of_part}, of_part) <= 1e-5
    assert found.keys() == expected.keys()


@pytest.mark.parametrize(("context", "expected"), [(5, 5), (20, 9)])
def test_the_context_are_documents_of_the_batch_each_once(context, expected):
    stage, drawn = tiny_stages.stage("cde", batch=9, context=context, sequence_dropout=0.0), []
    for number in range(8):
        [batch] = stage.batch(number)
        documents = [s.tokens_L[context:].tolist() for s in batch.sequences[9:]]
        where = [documents.index(c.tokens_L.tolist()) for c in batch.context]
        assert len(set(where)) == expected and batch.visible.tolist() == list(range(expected))
        drawn.append(tuple(sorted(where)))
    assert len(set(drawn)) > 4 or expected == 9


def made(start, **more):
    values = {"query_length": 6, "document_length": 16, "cluster_size": 0, "filter_margin": -1.0}
    return tiny_stages.on_the_corpus("cde", start, only=["english"], **values | more)


def test_both_encoders_start_from_one_checkpoint(start, tmp_path):
    stage = made(start)
    path = train(stage, model := stage.model(start), tmp_path / "cde")
    facts = {"stage": "cde", "pooling": "mean", "fingerprint": path.parent.name, "context": 4}
    assert backbone.facts(path) == facts
    embedder = ContextEmbedder.from_pretrained(path, device="cpu")
    before = backbone.load(start).state_dict()
    for one in (embedder.encoder.first, embedder.encoder.second.backbone):
        moved = {(one.state_dict()[key] - value).abs().max() for key, value in before.items()}
        assert 0 < max(moved) < 0.05
    found = embedder.with_context(["Number 7 is written with 1 digits."]).encode(["How is number 7 written?"])
    assert found.shape == (1, 32)
    train(stage, again := stage.model(start), tmp_path / "cde")  # nothing is due
    assert all(map(torch.equal, model.parameters(), again.parameters()))


def test_no_context_is_refused(start):
    stage = tiny_stages.stage("cde", {"one": tiny_stages.pairs(12)}, context=0)
    with pytest.raises(ValueError, match="a plain encoder is trained by stage Pair"):
        stage.model(start)


def test_a_cap_on_pairs_holds_with_and_without_context(start, monkeypatch):
    monkeypatch.setattr(mining, "FEWEST", 5)

    without = {"context": 0, "kind": Pair}
    cases = {}, {"max_pairs": 10**6}, {"max_pairs": 20}, {"max_pairs": 20} | without
    whole, same, capped, plain = (made(start, **case).data["docs"] for case in cases)
    assert [len(rows.queries) for rows in (whole, same, capped, plain)] == [60, 60, 20, 20]
    # The same files of tokens.
    assert whole.hash == same.hash != capped.hash == plain.hash
