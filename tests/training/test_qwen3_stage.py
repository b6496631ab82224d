"""The stage of Qwen3-Embedding: what it computes, its two phases as jobs, and what it keeps on its way."""

import numpy as np
import pytest
import tiny_stages
import torch
from safetensors.torch import load_file

import tiny
import tiny_corpus
from unmask import Embedder
from unmask.data.tokenized import TokenPairs
from unmask.data.tokens import END_OF_TEXT, tokenize
from unmask.losses import qwen3_loss
from unmask.models import backbone
from unmask.models.embedder import INSTRUCTIONS, instructed
from unmask.models.encoding import encode_rows
from unmask.models.quantize import int8
from unmask.training.distributed import ALONE
from unmask.training.launch import milestones
from unmask.training.loop import data_report, run_job
from unmask.training.neighbours import numbered


@pytest.mark.parametrize("changes", [{}, {"negatives": 0}, {"quantize": True}])
def test_a_step_is_the_mean_of_the_loss_over_the_prefixes(changes):
    settings = tiny_stages.config("qwen3", batch=6, **changes)
    model, stage = tiny_stages.model("qwen3"), tiny_stages.stage("qwen3", settings)
    batch = stage.batch(0)
    n, k = batch.count, settings.negatives
    rows = torch.cat([encode_rows(model, [s], pooling="last") for s in batch.sequences])
    rows = int8(rows) if settings.quantize else rows
    q, d, hard = rows[:n], rows[n : 2 * n], rows[2 * n :].unflatten(0, (n, k))
    options = {"temperature": settings.temperature, "margin": settings.margin}
    loss = sum(qwen3_loss(q[:, :p], d[:, :p], hard[..., :p], **options) for p in (16, 32)) / 2
    loss.backward()
    expected = tiny.gradients(model)
    model.zero_grad()
    row = stage.backward(model, batch, 0, ALONE)
    assert float(row["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    found = tiny.gradients(model)
    assert torch.stack([(found[key] - expected[key]).norm() for key in expected]).norm() <= 1e-5 * norm


def test_hard_negatives_stay_with_their_query_and_equal_texts_have_equal_numbers():
    a, b, c, q = (np.array(ids, np.uint16) for ids in ([5, 6, 0], [7, 0], [8, 9, 0], [4, 0]))
    hard = {"x": [b, c], "y": [c, a], "z": [a, b]}
    queries = [np.append(q, np.uint16(i)) for i in range(3)]
    data = TokenPairs(queries, [a, b, a], list(hard), list(hard.values()))
    stage = tiny_stages.stage("qwen3", tiny_stages.config("qwen3", batch=3), {"one": data})
    batch = stage.batch(0)
    texts = [s.tokens_L.tolist() for s in batch.sequences]
    numbers = numbered(batch.sequences[3:]).tolist()
    assert len(set(zip(numbers, map(str, texts[3:])))) == len(set(numbers)) == 3
    for place, row in enumerate(stage.plan(0)[1]):
        assert texts[6 + 2 * place : 8 + 2 * place] == [text.tolist() for text in data.negatives[row]]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The second phase, from a causal checkpoint."""
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path))
    tiny_corpus.install(monkeypatch)
    model = tiny.model(bidirectional=False, head=True)
    start = backbone.save(model, tiny.tokenizer(), tmp_path / "start", stage="ar", fingerprint="tiny")
    values = {"steps": 6, "query_length": 90, "document_length": 9, "negatives": 2, "dimensions": [16, 32]}
    more = tiny_stages.mined(tmp_path) | {"milestones": [3, 6], "groups": ["english"]}
    return tiny_stages.job("qwen3", start, tmp_path / "full", values | {"checkpoint_every": 2}, more)


def test_both_phases_train_and_leave_an_embedder_with_instructions(job, tmp_path):
    changes = {"negatives": 0, "steps": 2}
    weak = run_job(job | {"folder": str(tmp_path / "weak"), "changes": changes}, lambda row: None)
    full = run_job(job | {"start": str(weak)}, lambda row: None)
    for path in (weak, full):
        assert [(row["data set"], row["rows"]) for row in data_report(path)] == [("docs", 60)]
    embedder = Embedder.from_pretrained(full, device="cpu")
    assert (embedder.pooling, embedder.special_tokens) == ("last", True)
    assert embedder.model.config.is_causal is not False
    assert backbone.facts(full)["prompts"]["query"] == instructed(INSTRUCTIONS["english"], "")
    # What was read: the instruction, the query and the end, counted once.
    texts = [instructed(INSTRUCTIONS["english"], row["query"]) for row in tiny_corpus.PAIRS]
    queries = [min(len(ids) + 1, 90) for ids in tokenize(tiny.tokenizer(), texts, 999)]
    documents = tokenize(tiny.tokenizer(), [row["document"] for row in tiny_corpus.PAIRS], 999)
    tokens = sum(queries) + sum(min(len(ids) + 1, 9) for ids in documents)
    assert data_report(weak)[0]["tokens"] == tokens
    assert embedder.around[1].tolist() == [embedder.tokenizer.convert_tokens_to_ids(END_OF_TEXT)]


class Interrupted(Exception):
    pass


def weights(path):
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path / "model.safetensors").items()}


def test_milestones_are_kept_also_where_the_training_was_interrupted(job, tmp_path):
    whole = run_job(job, lambda row: None)
    first, last = milestones(whole)
    assert [path.name for path in (first, last)] == ["step-0000003", "step-0000006"]
    assert weights(last) == weights(whole) != weights(first)
    assert backbone.facts(first) == backbone.facts(whole) | {"fingerprint": "x-3"}

    def stop_at(step):
        def report(row):
            if row.get("step") == step:
                raise Interrupted

        return report

    parts = job | {"folder": str(tmp_path / "parts")}
    for step in (2, 4):  # before the milestone, which the checkpoint of step 2 comes before; after it
        with pytest.raises(Interrupted):
            run_job(parts, stop_at(step))
    found = milestones(run_job(parts, lambda row: None))
    assert [weights(path) for path in found] == [weights(first), weights(last)]
