import numpy as np
import pytest
import tiny_stages
import torch
from datasets import Dataset
from tiny_stages import assert_same, backpropagated, step
from transformers import AutoModelForCausalLM

from unmask.losses import answer_loss
from unmask.models.embedder import INSTRUCTIONS
from unmask.models.reranker import Reranker
from unmask.training.loop import run_job, stage_of


def test_a_step_is_the_mean_over_prompts_that_are_read_alone():
    stage, model = tiny_stages.stage("reranker", token_budget=40), tiny_stages.model("reranker")
    batch, losses = stage.batch(0), []
    for prompt_L, answer in zip(batch.prompts, batch.answer_B):
        logits_V = model(torch.from_numpy(prompt_L.astype(np.int64))[None]).logits[0, -1]
        losses.append(-logits_V.log_softmax(0)[answer])
    assert_same(step(stage, model, batch), backpropagated(torch.stack(losses).mean(), model))


@pytest.fixture
def job(causal, tmp_path):
    """A reranker's training on mined triplets of a tiny corpus."""
    values = {"query_length": 5, "document_length": 9, "negatives": 2}
    return tiny_stages.job("reranker", causal, tmp_path / "reranker", values, tiny_stages.mined(tmp_path))


def test_a_trained_checkpoint_is_a_causal_language_model_that_reranks(job):
    rows = []
    path = run_job(job, rows.append)
    assert [row["prompts"] for row in rows if "loss" in row] == [12, 12]
    assert AutoModelForCausalLM.from_pretrained(path).config.is_causal
    assert len(Reranker.from_pretrained(path).rerank("How is number 3 written?", ["Number 3", "4"])) == 2


def test_a_bidirectional_start_is_refused_before_it_is_paid_for(start, job):
    with pytest.raises(ValueError, match="is bidirectional: a reranker starts from a causal model"):
        run_job(job | {"start": str(start)}, lambda row: None)


def test_training_and_inference_read_the_same_tokens(job):
    """Cut ones too: the loss of a batch follows from the reranker's own scores."""
    for stage in (stage_of(job), stage_of(job | {"stage": "qwen3"})):  # another group has another instruction
        assert INSTRUCTIONS["code"] in stage.reading("code")[0].around[0]
    pairs = stage_of(job).data["docs"]
    assert pairs.counters["texts cut"] > 0
    reranker = Reranker.from_pretrained(job["start"], token_budget=10**6)
    table = Dataset.from_parquet(job["negatives"])
    for row in (0, 31):
        texts = [table[row]["document"], *table[row]["negatives"][:2]]
        options = {"instruction": INSTRUCTIONS["english"], "query_length": 5, "document_length": 9}
        odds_M = reranker.log_odds(table[row]["query"], texts, **options)
        for document_L, odds in zip([pairs.documents[row], *pairs.negatives[row]], odds_M, strict=True):
            prompt_L = torch.from_numpy(np.concatenate([pairs.queries[row], document_L]).astype(np.int64))
            hidden_1LD = reranker.model.model(prompt_L[None]).last_hidden_state
            last, head_VD = torch.tensor([len(prompt_L) - 1]), reranker.model.lm_head.weight
            answers = (torch.tensor([answer]) for answer in (reranker.yes, reranker.no))
            yes, no = (answer_loss(hidden_1LD, head_VD, last, answer_1) for answer_1 in answers)
            assert (no - yes).item() == pytest.approx(odds, abs=1e-5 * no.item())
