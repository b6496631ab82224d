"""The stage of Qwen3-Embedding: what it computes, its two phases as jobs, and what it keeps on its way."""

import numpy as np
import pytest
import tiny_stages
import torch
from tiny_stages import Interrupted, Reported, assert_same, backpropagated, step

import tiny
import tiny_corpus
from unmask import Embedder
from unmask.data.tokenize import TokenPairs
from unmask.data.tokens import END_OF_TEXT
from unmask.losses import qwen3_loss
from unmask.models import backbone
from unmask.models.embedder import INSTRUCTIONS, instructed
from unmask.models.encoding import encode_rows
from unmask.models.quantize import int8
from unmask.training import data_report, milestones, train
from unmask.training.contrastive import text_ids


@pytest.mark.parametrize("changes", [{}, {"negatives": 0}, {"quantize": True}])
def test_a_step_is_the_mean_of_the_loss_over_the_prefixes(changes):
    stage = tiny_stages.stage("qwen3", batch=6, margin=0.03, **changes)
    model = tiny_stages.model("qwen3")
    config, [batch] = stage.config, stage.batch(0)
    rows = torch.cat([encode_rows(model, [s], pooling="last") for s in batch.sequences])
    rows = int8(rows) if config.quantize else rows
    q, d, hard = rows[:6], rows[6:12], rows[12:].unflatten(0, (6, config.negatives))
    options = {"temperature": config.temperature, "margin": config.margin}
    loss = sum(qwen3_loss(q[:, :p], d[:, :p], hard[..., :p], **options) for p in (16, 32)) / 2
    assert_same(step(stage, model, [batch]), backpropagated(loss, model))


def test_hard_negatives_stay_with_their_query_and_equal_texts_have_equal_numbers():
    a, b, c, *queries = (np.array(ids) for ids in ([5, 6, 0], [7, 0], [8, 9, 0], [4, 0], [4, 1], [4, 2]))
    keys = np.array([[20, 10, 1], [21, 11, 2], [22, 12, 4]])  # two documents that are alike once they are cut
    hard, hard_keys = [[b, c], [c, a], [a, b]], np.array([[2, 3], [3, 1], [1, 2]])
    data = TokenPairs(queries, [a, b, a], keys, hard, hard_keys)
    stage = tiny_stages.stage("qwen3", {"one": data}, batch=3)
    [batch] = stage.batch(0)
    texts = [s.tokens_L.tolist() for s in batch.sequences]
    numbers = text_ids(batch.sequences, batch.key_R)[3:].tolist()
    assert len(set(zip(numbers, map(str, texts[3:])))) == len(set(numbers)) == 3
    for place, row in enumerate(stage.plan(0)[1]):
        assert texts[6 + 2 * place : 8 + 2 * place] == [text.tolist() for text in data.negatives[row]]


def second_phase(causal, tmp_path, **more):
    """From a causal checkpoint, on mined triplets."""
    values = {"steps": 6, "query_length": 90, "document_length": 9, "negatives": 2, "dimensions": [16, 32]}
    values |= {"mined": tiny_stages.mined(tmp_path), "milestones": [3, 6], "only": ["english"]}
    return tiny_stages.on_the_corpus("qwen3", causal, **values | {"checkpoint_seconds": 2} | more)


def test_both_phases_train_and_leave_an_embedder_with_instructions(causal, tmp_path):
    first = second_phase(causal, tmp_path, negatives=0, mined="", steps=2, milestones=[])
    weak = train(first, first.model(causal), tmp_path / "weak")
    full = train(stage := second_phase(weak, tmp_path), stage.model(weak), tmp_path / "full")
    embedder = Embedder.from_pretrained(full, device="cpu")
    assert (embedder.pooling, embedder.special_tokens) == ("last", True)
    assert embedder.model.config.is_causal is not False
    assert backbone.facts(full)["prompts"]["query"] == instructed(INSTRUCTIONS["english"], "")
    # What was read: the instruction, the query and the end, counted once.
    queries = [instructed(INSTRUCTIONS["english"], row["query"]) for row in tiny_corpus.PAIRS]
    columns = (queries, 90), ([row["document"] for row in tiny_corpus.PAIRS], 9)
    texts = ((ids, most) for x, most in columns for ids in tiny.tokenize(tiny.tokenizer(), x, 999))
    read = {"data set": "docs", "rows": 60}
    [first], [second] = data_report(weak), data_report(full)
    assert second == second | read
    assert first == first | read | {"tokens": sum(min(len(ids) + 1, most) for ids, most in texts)}
    assert embedder.around[1].tolist() == [embedder.tokenizer.convert_tokens_to_ids(END_OF_TEXT)]


def test_milestones_survive_an_interruption(causal, tmp_path):
    def trained(name, **options):
        path = train(stage, stage.model(causal), tmp_path / name, **options)
        saved = [*milestones(path), path]
        assert [one.name for one in saved] == ["step-0000003", "step-0000006", "model"]
        assert backbone.facts(saved[0]) == backbone.facts(path)
        return [(one / "model.safetensors").read_bytes() for one in saved]

    stage = second_phase(causal, tmp_path)
    whole = trained("full")
    assert whole[0] != whole[1] == whole[2]
    for number in (2, 4):  # before the milestone, which the checkpoint of step 2 comes before; after it
        with pytest.raises(Interrupted):
            trained("parts", watch=Reported(number))
    assert trained("parts") == whole
