"""Exact retrieval evaluation."""

from unmask.evaluation.metrics import Bm25, ranking_metrics, retrieval_metrics
from unmask.evaluation.search import similarity
