"""A language model behind an OpenAI-compatible endpoint: queries that it writes (pplx-embed, section 2.6)."""

from unmask_study.synthesis.client import EndpointError, replies
from unmask_study.synthesis.queries import synthesize_documents, synthesize_pairs
