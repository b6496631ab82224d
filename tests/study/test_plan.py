"""The plan's formulas against what torch counts, and its refusals."""

import itertools
import re
import shutil
from dataclasses import replace

import nbformat
import numpy as np
import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3Model

import tiny
from unmask.losses import diffusion_loss, next_token_loss, pair_loss
from unmask.models.attention import compile_layers
from unmask.models.context_encoder import SecondStage
from unmask.models.encoding import TokenSequence, after_context
from unmask.store import repository
from unmask.training import STAGES
from unmask.training.cache import cached_backward, cached_rows
from unmask.training.distributed import low_precision_copy
from unmask_study import plan
from unmask_study.settings import load_preset

SECTIONS = {kind.__name__: section for section, kind in STAGES.items()}
SHAPE = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_size": 16, "mlp_size": 64}


def planned(stage, which=-1, **values):
    """FLOPs of a step of one of a stage's trainings, with the shape of `tiny.model()` and its vocabulary."""
    changes = {f"backbone.{key}": value for key, value in SHAPE.items()}
    changes |= {f"{stage}.{key}": value for key, value in values.items()}
    preset = load_preset("smoke", changes | {"data.vocab_size": len(tiny.tokenizer())})
    found = [one for one in plan.trainings(preset, 1) if one.stage == stage][which]
    return found.flops / found.steps / found.number


def counted(work):
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def eager(**options):
    """Eager attention is made of plain products, which the counter knows forwards and backwards."""
    model = tiny.model(**options)
    model.config._attn_implementation = "eager"
    return model.train()


def sequences(number, length):
    return [TokenSequence(np.full(length, 7, np.int32)) for _ in range(number)]


def test_flops_of_pretraining_are_what_torch_counts():
    model = eager(head=True)
    tokens = torch.randint(4, 300, (4, 64))
    masked = torch.arange(64).expand(4, 64) % 2 == 0

    def hidden():
        return model.base_model(tokens, use_cache=False).last_hidden_state

    def diffusion():
        diffusion_loss(hidden(), model.lm_head.weight, tokens, masked, torch.full((4,), 0.5)).backward()

    def next_token():
        next_token_loss(hidden(), model.lm_head.weight, tokens).backward()

    assert planned("diffusion", batch=4, length=64) == pytest.approx(counted(diffusion), rel=0.02)
    assert planned("ar", 0, batch=4, length=64) == pytest.approx(counted(next_token), rel=0.02)


@pytest.mark.parametrize("budget", [4096, 256])  # one micro-batch, several
def test_flops_of_a_cached_step_are_what_torch_counts(budget):
    model, texts = eager(), sequences(32, 32)

    def step():
        cached_backward(model, texts, lambda rows: pair_loss(rows[:16], rows[16:]), token_budget=budget)

    budgets = {"token_budget": budget, "keep_tokens": budget}
    expected = planned("pair", batch=16, query_length=32, document_length=32, **budgets)
    assert expected == pytest.approx(counted(step), rel=0.03)


@pytest.mark.parametrize("budget", [4096, 256])
def test_flops_of_a_step_in_two_stages_are_what_torch_counts(budget):
    n, length, slots = 8, 32, 8
    first, second = eager(), SecondStage(eager(), slots)
    texts = sequences(2 * n, length)
    read = [after_context(text, slots) for text in texts]

    def step():
        context, push = cached_rows(first, texts[:slots], token_budget=budget)
        options = {"token_budget": budget, "context_KD": context.requires_grad_()}
        cached_backward(second, read, lambda rows: pair_loss(rows[:n], rows[n:]), **options)
        push(context.grad)

    sizes = {"batch": n, "query_length": length, "document_length": length}
    sizes |= {"token_budget": budget, "keep_tokens": budget}
    expected = planned("cde", **sizes, context=slots, context_sizes=[0, slots])  # the last of the study
    assert expected == pytest.approx(counted(step), rel=0.03)


@pytest.mark.parametrize("compiled", [False, True])
def test_activations_are_what_autograd_keeps(compiled):
    """Two layers less one, so that only a layer's own count; weights are bfloat16."""
    if compiled and not shutil.which("g++"):
        pytest.skip("no C++ compiler on this machine")
    shape = replace(load_preset("smoke").backbone, hidden_size=128, heads=4, kv_heads=2, mlp_size=192)
    kept = []
    for layers in (1, 2):
        model = low_precision_copy(Qwen3Model(Qwen3Config(**tiny.sizes(shape, layers, 300), is_causal=False)))
        if compiled:
            torch._dynamo.reset()
            compile_layers(model, same_length=True)
        kept.append(_kept_bytes(model))
    assert plan.activation_bytes(shape, compiled) == pytest.approx((kept[1] - kept[0]) / (4 * 64), rel=0.02)


def _kept_bytes(model):
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        graph = model(torch.randint(0, 300, (4, 64)), use_cache=False).last_hidden_state
    assert graph.requires_grad  # alive, so that no storage was used twice
    return sum(size for pointer, size in storages.items() if pointer not in own)


def test_every_training_of_the_notebooks_is_planned_and_no_other():
    started = set()
    for path in (repository() / "notebooks").glob("*.ipynb"):
        code = "\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code")
        # Pair(config, …), or Pair and its like with a section of their own
        own = re.findall(r'"section": "(\w+)"', code)
        kinds = re.findall(rf"\b({'|'.join(SECTIONS)})\(config, corpus", code)
        started |= {(path.stem, stage) for stage in own or map(SECTIONS.get, kinds)}
    found = [plan.trainings(load_preset(name), 1) for name in ("scratch", "cpu")]  # cpu's base is cut short
    assert {(t.notebook, t.stage) for t in itertools.chain(*found)} == started
    assert [sum(t.number for t in row) for row in found] == [44, 21]
    twice = plan.trainings(load_preset("scratch", {"ablation.rates": [0.5, 1.0]}), 1)
    assert sum(t.number for t in twice) == 44 + 8  # each arm once more
    chosen = plan.trainings(
        load_preset("scratch", {"ablation.rates": [0.5, 1.0], "ablation.rate_steps": 9}), 1
    )
    assert [(t.number, t.steps) for t in chosen if t.notebook[:2] == "07" and t.stage == "pair"][:2] == [
        (16, 9),  # each arm at each rate, shortly
        (8, 40),  # then at the rate that was chosen
    ]


def test_sharing_divides_the_state_and_more_gpus_the_work():
    preset = load_preset("paper-0.6b")
    alone, shared = (plan.memory_bytes(preset, "diffusion", gpus) for gpus in (1, 32))
    assert alone - shared == pytest.approx(16 * 596e6 * 31 / 32, rel=0.01)
    ddp = load_preset("paper-0.6b", {"parallel.strategy": "ddp"})
    assert plan.memory_bytes(ddp, "diffusion", 32) > shared
    one, many = (plan.trainings(preset, gpus)[0] for gpus in (1, 32))
    assert one.flops == many.flops and one.gpu_hours == pytest.approx(many.gpu_hours)


def test_what_cannot_fit_is_refused():
    one = {"parallel.num_machines": 1, "parallel.num_processes": 1}
    with pytest.raises(ValueError, match=r"cde needs \d+ GB per GPU on 1.* has 80 GB") as error:
        plan.describe(load_preset("paper-4b", one))
    assert str(error.value).endswith("helps: --gpus 64 --set parallel.strategy=fsdp2")  # checkpointing is on
    with pytest.raises(ValueError, match=r"8 GB\. It takes GPUs with more memory"):
        plan.describe(load_preset("hub-0.6b"), gpu_memory=8e9)


def test_each_remedy_helps():
    with pytest.raises(ValueError, match="Any of these helps") as error:
        plan.describe(load_preset("hub-0.6b"), gpu_memory=55e9)
    remedies = [remedy.split() for remedy in str(error.value).partition("helps: ")[2].split("; ")]
    assert [words[1].partition("=")[0] for words in remedies] == [
        "triplet.gradient_checkpointing",
        "triplet.token_budget",
        "16",  # GPUs
    ]
    for words in remedies:
        changes = dict(word.split("=") for word in words if "=" in word)
        changes = {key: yaml.safe_load(value) for key, value in changes.items()}
        gpus = int(words[1]) if words[0] == "--gpus" else 8
        changed = load_preset("hub-0.6b", changes | {"parallel.num_processes": gpus})
        assert plan.describe(changed, gpu_memory=55e9)


def test_float32_is_slower_than_bfloat16():
    found = {}
    for kind in ("bf16", "fp32"):
        planned = plan.trainings(load_preset("gpu", {"pair.precision": kind}), 1)
        found[kind] = next(one.gpu_hours for one in planned if one.notebook == "02_pair")
    assert found["fp32"] / found["bf16"] == pytest.approx(plan.PEAK["bf16"] / plan.PEAK["fp32"])


def test_what_would_not_fit_is_planned_in_smaller_parts():
    """As a training in one process would halve them; more is then embedded twice."""
    preset = load_preset("gpu")
    large, small = (plan.trainings(preset, 1, memory)[1] for memory in (80e9, 40e9))
    assert small.held < large.held and small.flops > large.flops
    assert 20 < small.memory_gb <= 40 < large.memory_gb <= 80
    several = load_preset("paper-0.6b", {"pair.token_budget": 0, "pair.keep_tokens": 0})
    assert plan.trainings(several, 32)[1].memory_gb > 80


def test_the_plan_of_the_paper_and_only_of_what_runs():
    text = plan.describe(load_preset("paper-4b"), ["01_diffusion_cpt", "05_merge"])
    assert "64 GPUs, fsdp2" in text and "02_pair" not in text
    numbers = r"1 × +60,000 steps +2\.52e\+11 tokens +1\.00e\+22 FLOP +8,057\.\d\d GPU-hours +48\.5 GB"
    assert re.search(rf"01_diffusion_cpt +diffusion +{numbers}", text)
    assert plan.describe(load_preset("smoke"), ["05_merge"]) == "nothing to train"


TOLD = re.compile(r"\| `([\w.-]+)` \|.*\| (\d+) GPUs?, ([\d.]+ \w+)")  # preset, GPUs, time
README = (repository() / "papermill_runs" / "README.md").read_text()


@pytest.mark.parametrize(("name", "gpus", "time"), TOLD.findall(README))
def test_the_readme_tells_what_the_plan_says(name, gpus, time):
    said = plan.describe(load_preset(name, {"parallel.num_processes": int(gpus)}))
    assert f" {time}" in said.splitlines()[-2]
