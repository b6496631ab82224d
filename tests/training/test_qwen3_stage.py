"""The stage of Qwen3-Embedding: what it computes, its two phases as jobs, and what it keeps on its way."""

import numpy as np
import pytest
import tiny_stages
import torch
from datasets import Dataset
from safetensors.torch import load_file

import tiny
import tiny_corpus
from unmask import Embedder
from unmask.config import load_preset, resolved
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
from unmask.training.neighbours import Qwen3


def relative_difference(one, two):
    error = torch.stack([(one[name] - two[name]).norm() for name in one]).norm()
    return float(error / torch.stack([gradient.norm() for gradient in one.values()]).norm())


@pytest.mark.parametrize("changes", [{}, {"negatives": 0}, {"quantize": True}])
def test_a_step_is_the_mean_of_the_loss_over_the_prefixes(changes):
    settings = tiny_stages.config("qwen3", batch=6, **changes)
    model, stage = tiny_stages.model("qwen3"), tiny_stages.stage("qwen3", settings)
    batch = stage.batch(0)
    n, k = batch.count, settings.negatives
    assert len(batch.sequences) == n * (2 + k) == 6 * (2 + k)
    rows = torch.cat([encode_rows(model, [s], pooling="last") for s in batch.sequences])
    rows = int8(rows) if settings.quantize else rows
    loss = sum(
        qwen3_loss(
            rows[:n, :p], rows[n : 2 * n, :p], rows[2 * n :, :p].reshape(n, k, p),
            temperature=settings.temperature, margin=settings.margin,
        )
        for p in (16, 32)
    ) / 2  # fmt: skip
    loss.backward()
    expected = tiny.gradients(model)
    model.zero_grad()
    row = stage.backward(model, batch, 0, ALONE)
    assert float(row["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    assert row["tokens"] == sum(map(len, batch.sequences)) and row["pairs"] == n
    assert relative_difference(expected, tiny.gradients(model)) <= 1e-5


def test_hard_negatives_stay_with_their_query_and_equal_texts_have_equal_numbers():
    a, b, c, q = (np.array(ids, np.uint16) for ids in ([5, 6, 0], [7, 0], [8, 9, 0], [4, 0]))
    data = TokenPairs([q, q, q], [a, b, a], ["x", "y", "z"], [[b, c], [c, a], [a, b]])
    stage = Qwen3({"one": data}, tiny_stages.config("qwen3", batch=3))
    for step in range(4):
        batch = stage.batch(step)
        texts = [s.tokens_L.tolist() for s in batch.sequences]
        documents, hard = texts[3:6], [texts[6:8], texts[8:10], texts[10:]]
        expected = {str(a.tolist()): [b, c], str(b.tolist()): [c, a]}
        assert batch.document_N.shape == (3,) and batch.hard_document_NK.shape == (3, 2)
        for i, document in enumerate(documents):
            for j, other in enumerate(documents):
                assert (batch.document_N[i] == batch.document_N[j]) == (document == other)
            own = [ids.tolist() for ids in expected[str(document)]]
            assert hard[i] == own or (document == a.tolist() and hard[i] == [a.tolist(), b.tolist()])
            for k, negative in enumerate(hard[i]):
                assert (batch.document_N[i] == batch.hard_document_NK[i, k]) == (document == negative)


TINY = {
    "qwen3.steps": 6, "qwen3.batch": 4, "qwen3.precision": "fp32", "qwen3.checkpoint_every": 2,
    "qwen3.warmup": 0, "qwen3.query_length": 90, "qwen3.document_length": 9, "qwen3.negatives": 2,
    "qwen3.dimensions": [16, 32], "qwen3.checkpoints": 2,
}  # fmt: skip


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The first phase, from a causal checkpoint."""
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path))
    tiny_corpus.install(monkeypatch)
    model = tiny.model(bidirectional=False, head=True)
    start = backbone.save(model, tiny.tokenizer(), tmp_path / "start", stage="ar", fingerprint="tiny")
    return {
        "values": resolved(load_preset("smoke", TINY)), "stage": "qwen3", "folder": str(tmp_path / "weak"),
        "fingerprint": "weak", "start": str(start), "groups": ["english"],
        "changes": {"negatives": 0, "steps": 2},
    }  # fmt: skip


def second_phase(job, start, tmp_path, **more):
    mined = [row | {"negatives": ["Number 7", "Number 8", "Number 9"]} for row in tiny_corpus.PAIRS]
    path = tmp_path / "negatives.parquet"
    Dataset.from_list(mined).to_parquet(path)
    own = {"folder": str(tmp_path / "full"), "fingerprint": "full", "start": str(start), "changes": {}}
    return job | own | {"negatives": str(path), "milestones": [3, 6]} | more


def test_both_phases_train_and_leave_an_embedder_with_instructions(job, tmp_path):
    weak = run_job(job, lambda row: None)
    read = data_report(weak)
    assert [(row["data set"], row["rows"]) for row in read] == [("docs", 60)]
    rows = []
    full = run_job(second_phase(job, weak, tmp_path), rows.append)
    assert {row["pairs"] for row in rows if "step" in row} == {4}
    assert [(row["data set"], row["rows"]) for row in data_report(full)] == [("docs", 60)]
    embedder = Embedder.from_pretrained(full, device="cpu")
    assert (embedder.pooling, embedder.special_tokens) == ("last", True)
    assert embedder.model.config.is_causal is not False
    assert backbone.facts(full)["prompts"]["query"] == instructed(INSTRUCTIONS["english"], "")
    # What was read: the instruction, the query and the end, counted once.
    texts = [instructed(INSTRUCTIONS["english"], row["query"]) for row in tiny_corpus.PAIRS]
    queries = [min(len(ids) + 1, 90) for ids in tokenize(tiny.tokenizer(), texts, 999)]
    documents = tokenize(tiny.tokenizer(), [row["document"] for row in tiny_corpus.PAIRS], 999)
    assert read[0]["tokens"] == sum(queries) + sum(min(len(ids) + 1, 9) for ids in documents)
    end = embedder.tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    assert embedder.around[1].tolist() == [end]


class Interrupted(Exception):
    pass


def weights(path):
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(path / "model.safetensors").items()}


def test_milestones_are_what_a_shorter_look_at_the_same_training_gives(job, tmp_path):
    """They are kept also where the training was interrupted, and belong to one training."""
    whole = run_job(second_phase(job, job["start"], tmp_path), lambda row: None)
    first, last = milestones(whole)
    assert [path.name for path in (first, last)] == ["step-0000003", "step-0000006"]
    assert weights(last) == weights(whole) != weights(first)
    assert backbone.facts(first) == backbone.facts(whole) | {"fingerprint": "full-3"}

    def stop_at(step):
        def report(row):
            if row.get("step") == step:
                raise Interrupted

        return report

    parts = second_phase(job, job["start"], tmp_path, folder=str(tmp_path / "parts"))
    for step in (2, 4):  # before the milestone, which the checkpoint of step 2 comes before; after it
        with pytest.raises(Interrupted):
            run_job(parts, stop_at(step))
    found = milestones(run_job(parts, lambda row: None))
    assert [weights(path) for path in found] == [weights(first), weights(last)]

    other = second_phase(
        job, job["start"], tmp_path, fingerprint="other", milestones=[2], changes={"lr": 1e-5, "steps": 3}
    )
    with pytest.raises(Interrupted):
        run_job(other, stop_at(2))
    assert milestones(whole) == [first, last]  # as long as its model is there
    changed = run_job(other, lambda row: None)
    assert [path.name for path in milestones(changed)] == ["step-0000002"]
    assert not first.exists() and not last.exists()
