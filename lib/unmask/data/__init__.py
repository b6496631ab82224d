"""From files to batches: registries of sources, checked rows, corpora, tokens, and which rows a step reads."""
