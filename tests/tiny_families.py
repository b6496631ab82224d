"""Tiny decoders of several families, with the tests' tokenizer."""

import torch
import transformers

import tiny
from unmask.models import backbone

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 1, "max_position_embeddings": 256, "tie_word_embeddings": True}
SHAPE |= {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
}


def model(family: str, *, bidirectional: bool = False, head: bool = False, seed: int = 0, layers: int = 2):
    if family == "qwen3":
        return tiny.model(bidirectional=bidirectional, head=head, seed=seed, layers=layers)
    config, kind = FAMILIES[family]
    torch.manual_seed(seed)
    built = kind(config(vocab_size=len(tiny.tokenizer()), **SHAPE | {"num_hidden_layers": layers}))
    if bidirectional:
        backbone.make_bidirectional(built, tiny.tokenizer(), "<|fim_pad|>")
    return (built if head else built.model).eval()


def gpt_neo():
    """A family whose class stays causal whatever its configuration says."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tiny.tokenizer()), "max_position_embeddings": 64, "hidden_size": 32}
    layers = {"num_layers": 2, "num_heads": 2, "attention_types": [[["global"], 2]]}
    config = transformers.GPTNeoConfig(**sizes, **layers, bos_token_id=0, eos_token_id=0)
    return transformers.GPTNeoForCausalLM(config).eval()


def mistral():
    """Attention over a window."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(vocab_size=len(tiny.tokenizer()), sliding_window=8, **SHAPE)
    return transformers.MistralForCausalLM(config).model.eval()


def alternating():
    """Four layers, every other one with attention over a window."""
    torch.manual_seed(0)
    kinds = ["full_attention", "sliding_attention"] * 2
    config = transformers.Qwen3Config(
        vocab_size=len(tiny.tokenizer()),
        sliding_window=8,
        use_sliding_window=True,
        layer_types=kinds,
        **SHAPE | {"num_hidden_layers": 4},
    )
    return transformers.Qwen3ForCausalLM(config).model.eval()


def xlm_roberta():
    """Positions that are counted from behind the number of the padding token, here 0."""
    config = transformers.XLMRobertaConfig(vocab_size=len(tiny.tokenizer()), **SHAPE)
    return transformers.XLMRobertaModel(config).eval()
