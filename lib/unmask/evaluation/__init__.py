"""Exact retrieval evaluation."""

from unmask.evaluation.ranking import bm25_scores, paired_bootstrap, ranking_metrics, retrieval_metrics
from unmask.similarity import similarity

__all__ = ["bm25_scores", "paired_bootstrap", "ranking_metrics", "retrieval_metrics", "similarity"]
