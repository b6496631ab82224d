"""Backbones, and what becomes of their token vectors: pooling, quantisation, embedders."""

from unmask.models.encoding import last_token_pool, mean_pool
from unmask.models.quantize import binary, int8, pack_binary
