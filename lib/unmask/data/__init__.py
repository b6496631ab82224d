"""From files to batches: registries of sources, checked rows, corpora, tokens, and what a step reads."""
