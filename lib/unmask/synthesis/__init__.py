"""Queries written by a language model behind an OpenAI-compatible endpoint (pplx-embed, section 2.6)."""

from unmask.synthesis.ask import Synthesis, synthesize_documents, synthesize_pairs
from unmask.synthesis.prompts import estimate, plan_documents, plan_pairs

__all__ = [
    "Synthesis", "estimate", "plan_documents", "plan_pairs", "synthesize_documents", "synthesize_pairs",
]  # fmt: skip
