"""mteb evaluates what `save_pretrained` writes as any other sentence-transformers model."""

import mteb
import numpy as np
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from sentence_transformers import SentenceTransformer

import tiny
from unmask import Embedder
from unmask.evaluation import retrieval_metrics

WORDS = " ".join(tiny.TEXTS[:4]).split()
DOCUMENTS = {f"d{i}": " ".join(WORDS[i : i + 9]) for i in range(24)}
QUERIES = {f"q{i}": " ".join(WORDS[i + 2 : i + 7]) for i in range(0, 24, 3)}
RELEVANT = {f"q{i}": {f"d{i}": 1} for i in range(0, 24, 3)}


class Words(AbsTaskRetrieval):
    metadata = TaskMetadata(
        name="Words",
        description="Find the passage that a few words were taken from.",
        dataset={"path": "in memory", "revision": "1"},
        type="Retrieval",
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        main_score="ndcg_at_10",
    )

    def load_data(self, **kwargs):
        self.queries, self.corpus, self.relevant_docs = (
            {"test": QUERIES}, {"test": DOCUMENTS}, {"test": RELEVANT},
        )  # fmt: skip
        self.convert_v1_dataset_format_to_v2(num_proc=None)
        self.data_loaded = True


def test_mteb_scores_a_saved_embedder_as_we_do(tmp_path):
    embedder = Embedder(tiny.model(), tiny.tokenizer(), device="cpu")
    model = SentenceTransformer(str(embedder.save_pretrained(tmp_path / "m")), device="cpu")
    found = mteb.evaluate(model, Words(), cache=None, co2_tracker=False, show_progress_bar=False)
    theirs = found.task_results[0].scores["test"][0]

    queries, documents = (embedder.encode(list(texts.values()), "float32") for texts in (QUERIES, DOCUMENTS))
    unit_q, unit_d = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (queries, documents))
    gold = [{list(DOCUMENTS).index(key) for key in RELEVANT[query]} for query in QUERIES]
    ours = retrieval_metrics(unit_q @ unit_d.T, gold, document_ids=list(DOCUMENTS))
    assert 0 < ours["ndcg@10"] < 1
    np.testing.assert_allclose(theirs["ndcg_at_10"], ours["ndcg@10"], atol=1e-4)
    np.testing.assert_allclose(theirs["recall_at_10"], ours["recall@10"], atol=1e-4)
