from dataclasses import replace

import numpy as np
import pytest
import torch

import tiny
from unmask.evaluation import retrieval_metrics
from unmask.evaluation.rerank import rerank_task
from unmask.evaluation.tasks import Task
from unmask.models.embedder import INSTRUCTIONS
from unmask.models.reranker import Reranker, answers

CHUNKS = [f"Number {i}, {'and more ' * (i % 5)}that is all." for i in range(30)]
TASK = Task(
    "numbers", "english", [f"Which is number {i}?" for i in range(8)], [[text] for text in CHUNKS],
    [{i, 29 - i} for i in range(8)],
)  # fmt: skip
SCORES_NM = torch.from_numpy(np.random.default_rng(0).integers(0, 6, (8, 30)) / 6)  # with ties


def reranker():
    model = tiny.model(bidirectional=False, head=True)
    model.config.max_position_embeddings = 1024
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(5 if parameter.ndim == 2 else 1)
    return Reranker(model, tiny.tokenizer())


def trec_order(scores_M, ids, columns):
    """trec_eval's: by score, then by id as a string, both descending."""
    return sorted(columns, key=lambda column: (np.float32(scores_M[column]), ids[column]), reverse=True)


@pytest.mark.parametrize("candidates", [10, 100])
@pytest.mark.parametrize("ids", [None, [f"{(7 * i) % 30:02}" for i in range(30)]])
def test_the_best_are_reordered_by_the_reranker_and_the_others_stay(candidates, ids):
    one, task = reranker(), replace(TASK, chunk_ids=ids)
    before_N, after_N = rerank_task(
        one, task, SCORES_NM, candidates=candidates, max_queries=5, query_length=4, document_length=6
    )
    names = ids or [str(i) for i in range(30)]
    for query in range(5):
        order = trec_order(SCORES_NM[query], names, range(30))
        best, rest = order[:candidates], order[candidates:]
        odds = one.log_odds(
            task.queries[query], [CHUNKS[i] for i in best],
            instruction=INSTRUCTIONS["english"], query_length=4, document_length=6,
        )  # fmt: skip
        reordered = trec_order(dict(zip(best, odds)), names, best)
        for ranking, found in ((best + rest, before_N), (reordered + rest, after_N)):
            place_1M = -np.argsort(ranking)[None].astype(float)
            expected = retrieval_metrics(place_1M, [task.relevant[query]])["ndcg@10"]
            assert found[query] == pytest.approx(expected)
    assert len(before_N) == len(after_N) == 5
    assert (before_N != after_N).any()


def test_equal_answers_are_ordered_as_trec_eval_orders_them():
    one = reranker()
    with torch.no_grad():
        one.model.get_input_embeddings().weight[list(answers(one.tokenizer.backend_tokenizer))] = 0
    _, after_N = rerank_task(one, TASK, SCORES_NM, candidates=30, max_queries=8)
    expected = retrieval_metrics(np.zeros((8, 30)), TASK.relevant, per_query=True)["ndcg@10"]
    np.testing.assert_array_equal(after_N, expected)
