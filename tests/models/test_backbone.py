"""A backbone of any family that honours `is_causal`, and its checkpoints."""

import json
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
import torch
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors.torch import load_file
from transformers import AutoModel, BertConfig, BertForMaskedLM, GraniteConfig, GraniteForCausalLM

import tiny
import tiny_families
from closeness import assert_close
from unmask import Embedder
from unmask.config import load_preset
from unmask.models import backbone
from unmask_study import recipe


def saved(folder, family="qwen3", **options):
    built = tiny_families.model(family, **{"bidirectional": True, "head": True, **options})
    return backbone.save(built, tiny.tokenizer(), folder, stage="diffusion")


@pytest.mark.parametrize("family", ["qwen3", "llama", "olmo2"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_last_token_reaches_the_first_position_only_without_the_causal_mask(
    family, batch, padded, bidirectional, tmp_path
):
    model = backbone.load(saved(tmp_path / "m", family, bidirectional=bidirectional))
    tokens = torch.arange(4, 13).repeat(batch, 1)
    last = 6 if padded else 8
    mask = (torch.arange(9) <= last).long().expand(batch, 9) if padded else None
    changed = tokens.clone()
    changed[:, last] += 1
    with torch.no_grad():
        before, after = (model(x, attention_mask=mask).last_hidden_state[:, 0] for x in (tokens, changed))
    assert (before != after).any(dim=1).tolist() == [bidirectional] * batch
    assert backbone.sees_both_sides(model) == bidirectional


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped")
def test_weights_as_they_are_stored_stay_in_their_file(tmp_path):
    """So a merge compares models that no memory holds."""
    model = backbone.load(
        backbone.save(tiny.model().bfloat16(), tiny.tokenizer(), tmp_path / "m"), dtype="auto"
    )
    weight, file = model.get_input_embeddings().weight, str(tmp_path / "m" / "model.safetensors")
    assert weight.dtype == torch.bfloat16
    mapped = [one.addr.split("-") for one in psutil.Process().memory_maps(False) if one.path == file]
    assert any(int(start, 16) <= weight.data_ptr() < int(end, 16) for start, end in mapped)


def test_a_checkpoint_loads_with_stock_classes_and_says_what_it_is(tmp_path):
    path = saved(tmp_path / "m")
    loaded = AutoModel.from_pretrained(path)
    assert type(loaded).__name__ == "Qwen3Model"
    assert (loaded.config.is_causal, loaded.config.use_bidirectional_attention) == (False, True)
    assert loaded.config.mask_token_id == tiny.tokenizer().convert_tokens_to_ids("<|fim_pad|>")
    assert backbone.facts(path) == {"stage": "diffusion"}
    tokens = torch.arange(4, 20)[None]
    with torch.no_grad():
        assert_close(loaded(tokens).last_hidden_state, tiny.model()(tokens).last_hidden_state)


def test_vocabulary_and_merges_lie_beside_the_tokenizer(tmp_path):
    path = saved(tmp_path / "m")
    vocabulary = json.loads((path / "vocab.json").read_text(encoding="utf8"))
    assert vocabulary.items() <= tiny.tokenizer().get_vocab().items() and len(vocabulary) >= 256
    merges = json.loads((path / "tokenizer.json").read_text(encoding="utf8"))["model"]["merges"]
    lines = (path / "merges.txt").read_text(encoding="utf8").splitlines()
    assert [line for line in lines if not line.startswith("#version")] == [" ".join(pair) for pair in merges]


def test_what_cannot_become_bidirectional_is_refused():
    with pytest.raises(ValueError, match="not in the vocabulary"):
        backbone.make_bidirectional(tiny.model(bidirectional=False), tiny.tokenizer(), "<mask>")
    with pytest.raises(ValueError, match="GPTNeoForCausalLM stays causal with is_causal = False"):
        backbone.make_bidirectional(tiny_families.gpt_neo(), tiny.tokenizer(), "<|fim_pad|>")


@pytest.mark.parametrize("load", [backbone.load, Embedder.from_pretrained])
def test_what_is_no_checkpoint_is_refused(load, tmp_path):
    (tmp_path / "own.gguf").write_bytes(b"GGUF")
    for path in (tmp_path / "nothing", tmp_path / "own.gguf"):
        with pytest.raises(ValueError, match=r"Give one with .*, smollm2-135m, or a Hub name with its"):
            load(path)
    with pytest.raises(ValueError, match=r"is no checkpoint: config.json and \*.safetensors missing"):
        load(tmp_path)
    path = saved(tmp_path / "m")
    weights, config = path / "model.safetensors", path / "config.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match=f"weights in {path} are cut short or broken"):
        load(path)
    weights.write_bytes(whole)
    config.write_text("{")
    with pytest.raises(OSError, match=f"{config}' is not a valid JSON"):
        load(path)


LOADS = """
import csv, logging, sys, warnings
import fsspec.compression
import numpy, torch
import transformers
from transformers.utils.logging import is_progress_bar_enabled

def host():
    loggers = [logging.getLogger(name) for name in (None, *theirs)]
    yield [(one.level, one.filters, one.handlers, one.propagate, one.disabled) for one in loggers]
    yield transformers.PreTrainedModel._keys_to_ignore_on_load_unexpected, is_progress_bar_enabled()
    yield csv.field_size_limit(), warnings.filters, fsspec.compression.compr, torch.get_num_threads()

theirs = [*logging.root.manager.loggerDict]
before = repr([*host()])
from unmask import Embedder
from unmask.config import load_preset
for path in sys.argv[2:]:
    Embedder.from_pretrained(path).save_pretrained(sys.argv[1])
    import unmask.data.rows
    assert repr([*host()]) == before
"""


def test_a_load_says_nothing_and_changes_nothing_of_its_host(tmp_path):
    """Also where the file holds a head that nobody reads, or lacks a pooler that nobody reads."""
    saved(tmp_path / "head", bidirectional=False)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tiny.tokenizer()), **sizes)
    backbone.save(BertForMaskedLM(config), tiny.tokenizer(), tmp_path / "bert")
    arguments = [tmp_path / name for name in ("out", "head", "bert")]
    done = subprocess.run([sys.executable, "-c", LOADS, *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_scaled_head_is_refused(tmp_path):
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = GraniteConfig(**shape, num_attention_heads=2, num_key_value_heads=2, logits_scaling=4.0)
    GraniteForCausalLM(config).save_pretrained(tmp_path)
    assert backbone.load(tmp_path)
    with pytest.raises(ValueError, match="its logits are scaled, capped or biased"):
        backbone.load(tmp_path, head=True)


def test_a_save_replaces_its_own_kind_and_nothing_else(tmp_path):
    path = saved(tmp_path / "many" / "model-a")
    with pytest.raises(ValueError, match=r"many holds model-a, which is of something else"):
        saved(tmp_path / "many")
    with pytest.raises(ValueError, match=r"config\.json is a file: name a folder"):
        saved(path / "config.json")
    (tmp_path / "latest").symlink_to(path)
    assert backbone.facts(saved(tmp_path / "latest")) == backbone.facts(path) == {"stage": "diffusion"}
    assert (tmp_path / "latest").is_symlink()


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    path = saved(tmp_path / "m")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tiny.tokenizer()), "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        backbone.save(tiny.model(seed=1), tiny.tokenizer(), path, stage="new")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert backbone.facts(path) == {"stage": "diffusion"}


def test_a_gpu_without_bf16_says_that_it_computes_in_float32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backbone, "has_bf16", lambda device: False)
    with pytest.warns(match="this GPU has no bf16: it computes in float32"):
        assert not backbone.computes_in_bf16("bf16")
    assert not backbone.computes_in_bf16("fp32")


@pytest.mark.parametrize(("family", "numbers"), [("llama", [3, 0, 1]), ("olmo2", [1])])
def test_a_model_cut_short_is_mergekits_passthrough(family, numbers, tmp_path):
    """One matrix is input and output. mergekit cannot cut a Qwen3: it leaves layer_types as they are."""
    whole = tiny_families.model(family, head=True, layers=4)
    path = backbone.save(whole, tiny.tokenizer(), tmp_path / "whole", source="Ours")
    cut = backbone.load(backbone.cut_short(path, numbers, tmp_path / "cut"), head=True)
    slices = [{"sources": [{"model": str(path), "layer_range": [i, i + 1]}]} for i in numbers]
    recipe = {"merge_method": "passthrough", "slices": slices, "dtype": "float32"}
    options = MergeOptions(write_model_card=False, copy_tokenizer=False, quiet=True)
    run_merge(MergeConfiguration.model_validate(recipe), str(tmp_path / "theirs"), options)
    files = (tmp_path / "theirs").glob("*.safetensors")
    expected = {name: x for file in files for name, x in load_file(file).items()}
    assert cut.config.num_hidden_layers == len(numbers)
    assert {name for name, _ in cut.named_parameters()} == expected.keys()
    assert all(torch.equal(x, expected[name]) for name, x in cut.named_parameters())
    named = f"Ours · cut short: its layers {str(numbers)[1:-1]} alone"
    assert backbone.facts(tmp_path / "cut")["source"] == named


def test_layers_that_stay_keep_their_kind_and_their_place():
    cut = backbone.keep_layers(tiny_families.alternating(), [2, 3])
    assert cut.config.layer_types == ["full_attention", "sliding_attention"]
    assert [layer.self_attn.layer_idx for layer in cut.layers] == [0, 1]


@pytest.mark.parametrize("numbers", [[], [0, 0], [0, 2], [-1], [1.0]])
def test_layers_that_a_model_has_not_are_one_message(numbers):
    with pytest.raises(ValueError, match=r"keep_layers \[.*one layer at least, of 0 to 1, and none twice"):
        backbone.keep_layers(tiny.model(), numbers)


def test_pages_say_what_a_recipe_starts_from():
    """Beside the claims that rest on it."""
    shape = load_preset("smollm2").backbone
    assert recipe.origin(shape) == "SmolLM2-135M-Instruct, four-bit weights"
    for numbers, cut in {(0, 1, 2, 3): "first 4 layers", (0, 9): "layers (0, 9)"}.items():
        said = f"SmolLM2-135M-Instruct, four-bit weights, cut to its {cut}"
        assert recipe.origin(replace(shape, keep_layers=numbers)) == said
    assert recipe.origin(replace(shape, checkpoint="org/model")) == "org/model"
    assert recipe.origin(load_preset("smoke").backbone) == "trained from scratch"
