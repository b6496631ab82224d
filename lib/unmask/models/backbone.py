"""The Transformer behind every stage: a stock decoder of transformers, causal or bidirectional through
`config.is_causal`.

From scratch it is a Qwen3; a ready checkpoint may be of any family that honours `is_causal`. Keeping the
stock class is a feature: mergekit, sentence-transformers and AutoModel load what we save without remote code.
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.logging import disable_progress_bar

from unmask.config import BackboneConfig
from unmask.models.pretrained import facts as facts
from unmask.models.pretrained import require_checkpoint
from unmask.models.pretrained import save as save
from unmask.models.pretrained import write as write

disable_progress_bar()  # a bar for every load would bury what a notebook shows


def build(config: BackboneConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> Qwen3ForCausalLM:
    """A causal Qwen3 decoder from scratch, the small stand-in for Qwen3-*-Base."""
    torch.manual_seed(seed)
    shape = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_size,
        max_position_embeddings=config.max_length,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.pad_token_id,
        is_causal=True,
    )
    model = Qwen3ForCausalLM(shape)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=config.embedding_std)
    return model


def make_bidirectional(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, mask_token: str
) -> PreTrainedModel:
    """Turns the causal mask off and gives an existing token the role of [MASK] (pplx-embed, section 2.1).

    Both facts go into config.json: `is_causal`, which transformers reads, `use_bidirectional_attention`,
    which text-embeddings-inference reads, and `mask_token_id`.

    Raises: ValueError if the token is not in the vocabulary (no row is ever added), or if the model's class
        stays causal all the same.
    """
    mask_token_id = tokenizer.get_vocab().get(mask_token)
    if mask_token_id is None:
        raise ValueError(
            f"mask token {mask_token!r} is not in the vocabulary: "
            "set backbone.mask_token to a rarely used token"
        )
    model.config.is_causal = False
    model.config.use_bidirectional_attention = True
    model.config.mask_token_id = mask_token_id
    if not sees_both_sides(model):
        raise ValueError(
            f"{type(model).__name__} stays causal with is_causal = False (the first position does not notice "
            "when the last token changes): take a family that honours it, Llama or Qwen3 for instance"
        )
    return model


@torch.no_grad()
def sees_both_sides(model: PreTrainedModel) -> bool:
    """Whether the first position of a text depends on its last token, with the model's attention as it is."""
    parameter = next(model.parameters())
    tokens_BL = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]], device=parameter.device)  # differ in the last one
    training = model.training
    first_BD = model.eval().base_model(input_ids=tokens_BL, use_cache=False).last_hidden_state[:, 0]
    model.train(training)
    return not torch.equal(first_BD[0], first_BD[1])


def load(path: str | Path, *, head: bool = False) -> PreTrainedModel:
    """Loads a checkpoint in float32, by directory or Hub name; `head` keeps the language-model head.

    Raises: ValueError if a directory is given that holds no checkpoint, or weights that are cut short.
    """
    source = require_checkpoint(path)
    for file in Path(source).glob("*.safetensors"):
        try:
            safe_open(file, "pt")
        except SafetensorError as error:
            raise ValueError(f"{file} is cut short or broken ({error}): copy it again") from None
    kind = AutoModelForCausalLM if head else AutoModel
    return kind.from_pretrained(source, dtype=torch.float32)


def layers(model: torch.nn.Module) -> torch.nn.ModuleList:
    """The layers of every Transformer in a model."""
    return torch.nn.ModuleList(m for m in model.modules() if isinstance(m, GradientCheckpointingLayer))


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer that lies beside a checkpoint."""
    return AutoTokenizer.from_pretrained(require_checkpoint(path, weights=False))


def computes_in_bf16(precision: str) -> bool:
    """Whether a preset's "bf16" is to be had: on a processor that has to emulate bf16, float32 is three times
    faster and at least as exact, so it is taken instead."""
    if torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = platform.machine() not in ("x86_64", "AMD64") or (
            torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        )
    return precision == "bf16" and fast
