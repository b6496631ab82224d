"""Queries written by a language model behind an OpenAI-compatible endpoint (pplx-embed, section 2.6)."""

from unmask.synthesis.chunking import chunks
from unmask.synthesis.plan import estimate, plan_documents, plan_pairs
from unmask.synthesis.queries import Synthesis, synthesize_documents, synthesize_pairs

__all__ = [
    "Synthesis",
    "chunks",
    "estimate",
    "plan_documents",
    "plan_pairs",
    "synthesize_documents",
    "synthesize_pairs",
]
