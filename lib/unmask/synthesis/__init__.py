"""Queries written by a language model behind an OpenAI-compatible endpoint (pplx-embed, section 2.6)."""

from unmask.synthesis.ask import synthesize_documents, synthesize_pairs
