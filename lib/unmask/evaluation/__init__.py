"""Exact retrieval evaluation."""

from unmask.evaluation.ranking import bm25_scores, paired_bootstrap, retrieval_metrics
from unmask.similarity import similarity

__all__ = ["bm25_scores", "paired_bootstrap", "retrieval_metrics", "similarity"]
