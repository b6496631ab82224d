"""Exact retrieval evaluation."""

from unmask.evaluation.ranking import Bm25, ranking_metrics, retrieval_metrics
from unmask.similarity import similarity

__all__ = ["Bm25", "ranking_metrics", "retrieval_metrics", "similarity"]
