"""Exact retrieval evaluation."""

from unmask.evaluation.ranking import Bm25, paired_bootstrap, ranking_metrics, retrieval_metrics
from unmask.similarity import similarity

__all__ = ["Bm25", "paired_bootstrap", "ranking_metrics", "retrieval_metrics", "similarity"]
