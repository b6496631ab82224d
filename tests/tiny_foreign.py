"""Tiny checkpoints in the layouts of others: sentence-transformers', and the released pplx-embed and
Qwen3-Embedding ones."""

import json
from string import ascii_lowercase as LETTERS

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, BertTokenizer, PreTrainedTokenizerFast

import tiny

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
OWN = {"sentence_transformers.models.Transformer": "", "sentence_transformers.models.Pooling": "1_Pooling"}


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def write_modules(folder, kinds):
    listed = [{"idx": i, "name": str(i), "path": p, "type": t} for i, (t, p) in enumerate(kinds.items())]
    (folder / "modules.json").write_text(json.dumps(listed))


def bert(folder):
    """A BERT whose tokenizer puts [CLS] and [SEP] around a text."""
    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *("##" + one for one in LETTERS)]
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)}, model_max_length=64)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    shape = BertConfig(vocab_size=len(words), max_position_embeddings=64, **sizes)
    BertModel(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def causal_qwen3(folder):
    """A causal Qwen3 whose tokenizer adds <|endoftext|> and pads on the left, as Qwen3-Embedding's."""
    tokenizer = tiny.tokenizer()
    plain = tokenizer.backend_tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    end, special = tokenizer.eos_token, [(tokenizer.eos_token, tokenizer.eos_token_id)]
    plain.post_processor = TemplateProcessing(single=f"$A {end}", pair=f"$A $B {end}", special_tokens=special)
    tiny.model(bidirectional=False).save_pretrained(folder)
    options = {"eos_token": end, "pad_token": end, "padding_side": "left"}
    PreTrainedTokenizerFast(tokenizer_object=plain, **options).save_pretrained(folder)
    return folder


def qwen3_embedding(folder):
    """A tiny checkpoint with the files of the released Qwen3-Embedding, where the final token is not the
    eos_token, and sentence_bert_config.json is missing."""
    causal_qwen3(folder)
    write_modules(folder, OWN | {"sentence_transformers.models.Normalize": "2_Normalize"})
    modes = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken")
    files = {
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "include_prompt": True}
        | {f"pooling_mode_{mode}": mode == "lasttoken" for mode in modes},
        "config_sentence_transformers.json": {"default_prompt_name": None, "similarity_fn_name": "cosine"}
        | {"prompts": {"query": f"Instruct: {INSTRUCTION}\nQuery:", "document": ""}},
    }
    (folder / "1_Pooling").mkdir()
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    edit(folder / "config.json", architectures=["Qwen3ForCausalLM"], use_cache=True)
    tokenizer = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "model_max_length": 131072}
    edit(folder / "tokenizer_config.json", **tokenizer)
    return folder


def sentence_transformers(source, folder, pooling="mean", *, normalize=False):
    """A sentence-transformers directory around a checkpoint."""
    modules = [Transformer(str(source)), Pooling(32, pooling), *([Normalize()] if normalize else [])]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)
    return folder


def released(folder):
    """A tiny checkpoint laid out as the released pplx-embed ones, in shards, with code that must not run."""
    model = tiny.model()
    model.save_pretrained(folder, max_shard_size="50KB")
    tiny.tokenizer().save_pretrained(folder)
    tokenizer = {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": False, "add_bos_token": False}
    edit(folder / "tokenizer_config.json", **tokenizer)
    own = ("is_causal", "mask_token_id", "rope_parameters", "dtype", "transformers_version")
    config = {key: value for key, value in model.config.to_dict().items() if key not in own}
    config |= {"model_type": "bidirectional_pplx_qwen3", "architectures": ["PPLXQwen3Model"]}
    config |= {"torch_dtype": "float32", "use_bidirectional_attention": True, "tie_word_embeddings": True}
    config |= {"rope_theta": 1_000_000, "rope_scaling": None}
    code = {"AutoConfig": "configuration.PPLXQwen3Config", "AutoModel": "modeling.PPLXQwen3Model"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": code}))
    for name in ("configuration.py", "modeling.py", "st_quantize.py"):
        (folder / name).write_text("raise RuntimeError('code of a checkpoint was run')\n")
    write_modules(folder, OWN | {"st_quantize.FlexibleQuantizer": "2_Quantizer"})
    return folder
