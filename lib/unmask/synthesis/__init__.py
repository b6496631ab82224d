"""A language model behind an OpenAI-compatible endpoint: queries that it writes (pplx-embed, section 2.6)."""

from unmask.synthesis.ask import replies, synthesize_documents, synthesize_pairs
