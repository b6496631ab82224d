"""The plan's formulas against what torch counts, and its refusals."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3Model

import tiny
from unmask.config import TRAINED, load_preset
from unmask.losses import diffusion_loss, next_token_loss, pair_loss, qwen3_loss
from unmask.models import backbone
from unmask.models.context_encoder import SecondStage
from unmask.models.encoding import TokenSequence, after_context
from unmask.models.quantize import int8
from unmask.store import repository
from unmask.study import plan
from unmask.training.cache import cached_backward, cached_rows
from unmask.training.distributed import Processes

TOKENS = 4 * 64  # of the batch whose activations are measured


def small(**overrides):
    """A preset of the shape of `tiny.model()`, whose vocabulary is the tiny tokenizer's."""
    shape = {
        "hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_size": 16, "mlp_size": 64,
    }  # fmt: skip
    values = {f"backbone.{key}": value for key, value in shape.items()}
    return load_preset("smoke", values | {"data.vocab_size": len(tiny.tokenizer())} | overrides)


def counted(work) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def eager(**options):
    """Eager attention is made of plain products, which the counter knows forwards and backwards."""
    model = tiny.model(**options)
    model.config._attn_implementation = "eager"
    return model.train()


def test_flops_of_pretraining_are_what_torch_counts():
    preset = small(**{"ar.batch": 4, "ar.length": 64, "diffusion.batch": 4, "diffusion.length": 64})
    model = eager(head=True)
    tokens = torch.randint(4, 300, (4, 64))
    masked = torch.arange(64).expand(4, 64) % 2 == 0

    def hidden():
        return model.base_model(tokens, use_cache=False).last_hidden_state

    def diffusion():
        diffusion_loss(hidden(), model.lm_head.weight, tokens, masked, torch.full((4,), 0.5)).backward()

    def next_token():
        next_token_loss(hidden(), model.lm_head.weight, tokens).backward()

    steps = {t.stage: t.flops / t.steps for t in plan.trainings(preset, 1)}
    assert steps["diffusion"] == pytest.approx(counted(diffusion), rel=0.02)
    assert steps["ar"] == pytest.approx(counted(next_token), rel=0.02)


@pytest.mark.parametrize("budget", [4096, 256])  # one micro-batch, four
def test_flops_of_a_cached_step_are_what_torch_counts(budget):
    sizes = {
        "pair.batch": 16,
        "pair.query_length": 32,
        "pair.document_length": 32,
        "pair.token_budget": budget,
    }
    model = eager()
    sequences = [TokenSequence(np.full(32, 7, np.int32)) for _ in range(32)]

    def step():
        cached_backward(model, sequences, lambda rows: pair_loss(rows[:16], rows[16:]), token_budget=budget)

    expected = {t.stage: t.flops / t.steps for t in plan.trainings(small(**sizes), 1)}["pair"]
    assert expected == pytest.approx(counted(step), rel=0.03)


@pytest.mark.parametrize("negatives", [0, 2])
def test_flops_of_a_step_with_hard_negatives_are_what_torch_counts(negatives):
    n, length = 8, 32
    sizes = {"batch": n, "query_length": length, "document_length": length, "token_budget": 4096}
    preset = small(**{f"qwen3.{key}": value for key, value in sizes.items()} | {"qwen3.negatives": 2})
    model = eager()
    sequences = [TokenSequence(np.full(length, 7, np.int32)) for _ in range((2 + negatives) * n)]

    def loss(rows):
        hard = rows[2 * n :].unflatten(0, (n, negatives)) if negatives else None
        return qwen3_loss(rows[:n], rows[n : 2 * n], hard)

    def step():
        cached_backward(model, sequences, loss, token_budget=4096, pooling="last")

    steps = {t.name: t.flops / t.steps for t in plan.trainings(preset, 1)}
    expected = steps["full" if negatives else "weak"]  # the first phase has none
    assert expected == pytest.approx(counted(step), rel=0.03)


@pytest.mark.parametrize("budget", [4096, 256])  # one micro-batch of each stage, several
def test_flops_of_a_step_in_two_stages_are_what_torch_counts(budget):
    n, length, slots = 8, 32, 8
    sizes = {"batch": n, "query_length": length, "document_length": length, "token_budget": budget}
    sizes |= {"context": slots, "context_sizes": [0, slots]}
    preset = small(**{f"cde.{key}": value for key, value in sizes.items()})
    first, second = eager(), SecondStage(eager(), slots)
    texts = [TokenSequence(np.full(length, 7, np.int32)) for _ in range(2 * n)]
    read = [after_context(text, slots) for text in texts]

    def step():
        context, push = cached_rows(first, texts[:slots], token_budget=budget)
        context.requires_grad_()
        cached_backward(
            second, read, lambda rows: pair_loss(rows[:n], rows[n:]), token_budget=budget, context_KD=context
        )
        push(context.grad)

    expected = {t.name: t.flops / t.steps for t in plan.trainings(preset, 1)}["context"]
    assert expected == pytest.approx(counted(step), rel=0.03)


def test_flops_of_reranking_are_what_torch_counts():
    preset = small(**{"reranker.batch": 2, "reranker.query_length": 10, "reranker.document_length": 18})
    model = eager(head=True, bidirectional=False)
    tokens = torch.randint(4, 300, (2 * (1 + preset.reranker.negatives), plan.PROMPT_TOKENS + 28))

    def step():
        hidden = model.base_model(tokens, use_cache=False).last_hidden_state
        cross_entropy(model.lm_head(hidden[:, -1]), torch.full((len(tokens),), 5)).backward()

    expected = {t.stage: t.flops / t.steps for t in plan.trainings(preset, 1)}["reranker"]
    assert expected == pytest.approx(counted(step), rel=0.02)


@pytest.mark.parametrize("mode", ["float32", "autocast", "bfloat16"])
def test_activations_are_what_autograd_keeps(mode):
    """Two layers less one, so that only a layer's own count; fsdp2's layers are bfloat16 throughout."""
    shape = replace(load_preset("smoke").backbone, hidden_size=128, heads=4, kv_heads=2, mlp_size=192)
    kept = []
    for layers in (1, 2):
        config = Qwen3Config(
            vocab_size=300, hidden_size=128, intermediate_size=192, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=shape.head_size, is_causal=False,
        )  # fmt: skip
        model = Qwen3Model(config)
        kept.append(_kept_bytes(model.bfloat16() if mode == "bfloat16" else model, mode == "autocast"))
    weights = sum(p.numel() for p in model.layers[1].parameters() if p.ndim == 2)
    # Autocast also keeps its copy of the weights, which the plan counts apart.
    measured = (kept[1] - kept[0] - (2 * weights if mode == "autocast" else 0)) / TOKENS
    expected = plan.activation_bytes(shape, half=mode != "float32", sharded=mode == "bfloat16")
    assert expected == pytest.approx(measured, rel=0.02)


def _kept_bytes(model, autocast: bool) -> int:
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        graph = model(torch.randint(0, 300, (4, 64)), use_cache=False).last_hidden_state
    assert graph.requires_grad  # alive, so that no storage was used twice
    return sum(size for pointer, size in storages.items() if pointer not in own)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory_is_the_peak_of_a_training(checkpointing):
    key = "pair.gradient_checkpointing"
    sizes = {"pair.batch": 64, "pair.query_length": 48, "pair.document_length": 48, "pair.token_budget": 4096}
    sizes |= {"data.vocab_size": len(tiny.tokenizer()), "backbone.layers": 4, "backbone.mlp_size": 1024}
    preset = load_preset("cpu", sizes | {key: checkpointing, "pair.precision": "fp32"})
    config = preset.pair
    sequences = [TokenSequence(np.full(48, 7, np.int32)) for _ in range(2 * config.batch)]

    def loss(rows):
        codes = int8(rows)
        return pair_loss(codes[: config.batch], codes[config.batch :])

    def training():
        model = backbone.build(preset.backbone, tiny.tokenizer(), seed=0).model.train()
        if checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            cached_backward(
                model, sequences, loss,
                token_budget=config.token_budget, processes=Processes.start(config.precision),
            )  # fmt: skip
            optimizer.step()
            optimizer.zero_grad()

    planned = plan.memory_bytes(preset, "pair", 1) - plan.RUNTIME_BYTES
    assert planned == pytest.approx(_peak_bytes(training), rel=0.1)


def _peak_bytes(work) -> int:
    """The most memory that tensors held at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return max(itertools.accumulate(changes))


def test_every_training_of_the_notebooks_is_planned_and_no_other():
    started = set()
    for path in (repository() / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf8"))["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        # launch(study, "pair", …), or ("pair", …) among the trainings of launch_all
        one = rf'(?:[(=]|launch\(\w+,)\s*"({"|".join(TRAINED)})",\s*(?:{{|job)'
        started |= {(path.stem, stage) for stage in re.findall(one, code) if "training.launch" in code}
    planned = plan.trainings(load_preset("cpu"), 1)
    assert {(t.notebook, t.stage) for t in planned} == started
    assert len({(t.notebook, t.name) for t in planned}) == len(planned) == 42


def test_what_a_training_changes_is_planned_for():
    config = {"cde.batch_sizes": [32, 64], "cde.context": 4, "cde.context_sizes": [0, 4]}
    preset = load_preset("smoke", config | {"qwen3.weak_steps": 9, "qwen3.steps": 5, "qwen3.negatives": 2})
    planned = {(t.notebook, t.name): t for t in plan.trainings(preset, 1)}
    study = {name: planned["10_cde", name] for name in preset.cde.trainings}
    assert study["b64-c8"].tokens == 2 * study["b32-c8"].tokens
    assert study["context"].parameters == 2 * study["plain"].parameters == 2 * plan.parameters(preset)[0]
    texts = 2 * (preset.cde.query_length + preset.cde.document_length + 2 * 4) * preset.cde.batch
    assert 2 * study["context"].tokens == preset.cde.steps * (texts + 2 * 4 * preset.cde.document_length)
    weak, full = (planned["11_qwen3_embedding", name] for name in ("weak", "full"))
    assert (weak.steps, full.steps) == (9, 5)
    lengths = preset.qwen3.query_length, preset.qwen3.document_length
    assert weak.tokens == 9 * preset.qwen3.batch * sum(lengths)
    assert full.tokens == 5 * preset.qwen3.batch * (lengths[0] + 3 * lengths[1])


def test_a_contextual_encoder_holds_two_models():
    preset = load_preset("gpu", {"cde.batch_sizes": [512], "cde.token_budget": 16384})
    planned = {t.name: t for t in plan.trainings(preset, 1) if t.stage == "cde"}
    plain, context = planned["b512-c512-filtered"], planned["context"]
    total, _ = plan.parameters(preset)
    more = context.memory_bytes_per_gpu - plain.memory_bytes_per_gpu
    assert 18 * total < more < 18 * total + plain.memory_bytes_per_gpu
    assert plan.disk_bytes(preset, [context]) - plan.disk_bytes(preset, [plain]) == (2 * 12 + 4) * total


def test_a_ready_checkpoint_needs_no_autoregressive_training():
    assert "ar" not in {t.stage for t in plan.trainings(load_preset("paper-0.6b"), 8)}


def test_sharing_divides_the_state_and_more_gpus_the_work():
    preset = load_preset("paper-0.6b")
    alone, shared = (plan.memory_bytes(preset, "diffusion", gpus) for gpus in (1, 32))
    assert alone - shared == pytest.approx(16 * 596e6 * 31 / 32, rel=0.01)
    ddp = load_preset("paper-0.6b", {"parallel.strategy": "ddp"})
    assert plan.memory_bytes(ddp, "diffusion", 32) > shared
    one, many = (plan.trainings(preset, gpus)[0] for gpus in (1, 32))
    assert one.flops == many.flops and one.gpu_hours == pytest.approx(many.gpu_hours)


def test_gradient_checkpointing_trades_flops_for_memory():
    key = "diffusion.gradient_checkpointing"
    without, with_it = (load_preset("paper-0.6b", {key: value}) for value in (False, True))
    less, more = (plan.trainings(preset, 32)[0] for preset in (without, with_it))
    assert more.memory_bytes_per_gpu < 0.5 * less.memory_bytes_per_gpu
    assert 1.25 < more.flops / less.flops < 4 / 3


def test_gpus_without_a_text_are_paid_for():
    preset = load_preset("paper-4b")  # sixteen documents a step
    hours = {
        gpus: {t.stage: t for t in plan.trainings(preset, gpus)}["contextual"].gpu_hours for gpus in (16, 64)
    }
    assert hours[64] == pytest.approx(4 * hours[16])
    idle = "contextual has too few texts in a step for 64 GPUs: 75% of their time is idle"
    assert idle in plan.describe(preset, gpus=64)


def test_what_cannot_fit_is_refused_with_what_takes_less():
    with pytest.raises(
        ValueError, match=r"the cde training needs 172 GB per GPU on 1 GPU.* has 80 GB"
    ) as error:
        plan.describe(load_preset("paper-4b"), gpus=1)
    assert "--set cde.token_budget=4096; --gpus 2 --set parallel.strategy=fsdp2" in str(error.value)
    assert plan.describe(load_preset("paper-4b"), gpus=4)
    preset = load_preset("gpu")
    with pytest.raises(ValueError, match=r"a GPU has 24 GB.*--set \w+.gradient_checkpointing=true"):
        plan.describe(preset, gpus=1, gpu_memory=24e9)


def test_the_plan_of_the_paper():
    text = plan.describe(load_preset("paper-4b"), gpus=64)
    assert "64 GPUs, fsdp2" in text
    assert re.search(
        r"01_diffusion_cpt +diffusion +60,000 +252 B +1\.\d\de\+22 +7,\d\d\d\.\d\d +31\.7 GB", text
    )
    assert re.search(r"time: \d+\.\d days of training at an MFU of 40% \(pretraining\)", text)


def test_without_gpus_nothing_is_said_about_them_and_only_what_runs_is_planned():
    text = plan.describe(load_preset("smoke"), gpus=0, stages=["02_pair", "05_merge"])
    assert "02_pair" in text and "01_diffusion_cpt" not in text
    assert "GPU-hours" not in text and "MFU" not in text and "per GPU" not in text
    assert "nothing to train" in plan.describe(load_preset("smoke"), gpus=1, stages=["05_merge"])


def test_disk_counts_checkpoints_models_and_text():
    preset = small()
    total, _ = plan.parameters(preset)
    planned = plan.trainings(preset, 1)
    contrastive = [t for t in planned if t.stage == "pair"]
    candidates = 2 * len(preset.merge.t) + 1  # and the export
    models = sum(t.parameters for t in contrastive) + candidates * total
    assert plan.disk_bytes(preset, contrastive) == 2 * 12 * total + 4 * models
    text = preset.data.max_text_mb * 1e6
    assert plan.disk_bytes(preset, planned) > plan.disk_bytes(preset, contrastive) + text
    alone, qwen3 = ([t for t in planned if t.name == name] for name in ("from_pair", "full"))
    kept = preset.qwen3.checkpoints + 1  # and the merged one
    assert plan.disk_bytes(preset, qwen3) == plan.disk_bytes(preset, alone) + 4 * kept * total
