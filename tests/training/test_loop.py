import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from itertools import count

import pytest
import tiny_stages
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_stages import Interrupted, Reported
from torch.distributed.checkpoint.api import CheckpointException

import tiny
from closeness import assert_close
from limits import full_disk
from unmask.training import loop
from unmask.training.distributed import Distributed
from unmask.training.launch import STOP
from unmask.training.watch import PROBES, probes, seconds_until


def fit(folder, name="pair", backward=None, report=lambda row: None, **changes):
    stage, model = tiny_stages.stage(name, **changes), tiny_stages.model(name)
    stage.backward = backward or stage.backward
    return trained(stage, model, folder, report)


def trained(stage, model, folder, report=lambda row: None):
    loop.steps(stage, model, folder, Distributed.alone(stage.config.precision), report, [])
    return model


def stopped(folder, step, name="pair", **changes):
    """What a training reports that ends at a step."""
    watch = Reported(step)
    watch.open(name, folder)
    with pytest.raises(Interrupted):
        fit(folder, name, report=watch, **changes)
    return watch.rows


def rows(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in found]


def assert_same(one, two, folder):
    """Models, and what was logged in folders "parts" and "whole"."""
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    first, second = rows(folder / "parts"), rows(folder / "whole")
    assert first == second and [row["step"] for row in first] == list(range(8))


RESUMED = [(name, {"precision": "fp32"}) for name in tiny_stages.STAGES]
RESUMED += [(name, {"precision": "bf16"}) for name in ("diffusion", "pair")]
RESUMED += [("diffusion", {"precision": "fp32", "freeze_embeddings": True})]
COMPILED = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler on this machine")
SLOW = [pytest.mark.slow, COMPILED]
RESUMED += [pytest.param("pair", {"precision": "bf16", "compile": True}, marks=SLOW)]


@pytest.mark.parametrize(("name", "how"), RESUMED)
def test_resumed_equals_uninterrupted(tmp_path, name, how):
    whole = fit(tmp_path / "whole", name, **how)
    # Stopped between two checkpoints, then at a step whose checkpoint is not yet written, then left alone.
    for step in (4, 5):
        stopped(tmp_path / "parts", step, name, **how)
    seen = []
    resumed = fit(tmp_path / "parts", name, report=seen.append, **how)
    assert seen[0] == {"total": 8, "done": 4}
    assert [row["step"] for row in seen[1:]] == [4, 5, 6, 7]
    assert_same(resumed, whole, tmp_path)


def test_what_is_measured_on_the_way_changes_nothing_and_is_kept(tmp_path):
    """Ten times, or after every step; also where the training was interrupted."""

    def watched(folder, stop=None):
        def probe(model):
            torch.rand(3)
            with torch.no_grad():
                return {"docs": float(next(model.parameters()).mul_(2).sum()), "code": 0.0}

        watch = Reported(stop, probe=probe)
        watch.open("pair", folder)
        stage, model = tiny_stages.stage("pair"), tiny_stages.model("pair")
        with watch:
            return trained(stage, model, folder, watch), watch.probed

    plain = fit(tmp_path / "parts")
    model, rows_whole = watched(tmp_path / "whole")
    assert_same(plain, model, tmp_path)
    with pytest.raises(Interrupted):
        watched(tmp_path / "again", 5)
    with (tmp_path / "again" / PROBES).open("a") as lines:  # half a line, as a full disk leaves
        lines.write('{"step": 6, "sec')
    _, rows_parts = watched(tmp_path / "again")
    measured = rows_whole, rows_parts, probes(tmp_path / "again" / "model")
    whole, parts, kept = ([(row["step"], row["docs"]) for row in found] for found in measured)
    assert whole == parts == kept and [step for step, _ in kept] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("name", ["ar", "diffusion"])
def test_embeddings_that_are_frozen_stay_and_all_else_learns(tmp_path, name):
    before, after = tiny_stages.model(name), fit(tmp_path, name, freeze_embeddings=True)
    same = {key for key, x in before.state_dict().items() if torch.equal(x, after.state_dict()[key])}
    tied = before.config.tie_word_embeddings
    assert same == {"model.embed_tokens.weight"} | ({"lm_head.weight"} if tied else set())
    assert all(parameter.requires_grad for parameter in after.parameters())


def test_time_to_a_bar_is_where_the_mean_stays_above_it():
    rows = [{"seconds": 10.0 * i, "docs": x, "code": x} for i, x in enumerate([0.6, 0.4, 0.7, 0.8])]
    assert [seconds_until(rows, bar) for bar in (0.5, 0.75, 0.9)] == [20.0, 30.0, None]


def test_a_training_is_adamw_on_clipped_gradients_at_the_rate_of_the_schedule(tmp_path):
    changes = {"steps": 4, "clip": 0.5, "beta1": 0.8, "weight_decay": 0.3, "gradient_checkpointing": True}
    found = fit(tmp_path, **changes)
    stage, model = tiny_stages.stage("pair", **changes), tiny_stages.model("pair").train()
    optimizer = torch.optim.AdamW(loop.parameter_groups(model, 0.3), betas=(0.8, stage.config.beta2))
    for number, factor in enumerate((0.5, 1, 1, 0.5)):  # warm-up of two steps, then the cosine
        tiny_stages.step(stage, model, stage.batch(number))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = factor * stage.config.lr
        optimizer.step()
    for one, two in zip(found.parameters(), model.parameters(), strict=True):
        assert_close(one, two)


def test_checkpoints_hold_no_pickle_and_what_a_kill_left_half_written_is_not_taken(tmp_path):
    stopped(tmp_path, 3)
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert [path.name for path in saved.iterdir()] == ["shard-00001-model-00001-of-00001.safetensors"]
    saved.rename(saved.with_name(f".{saved.name}.tmp"))
    assert stopped(tmp_path, 3)[0]["done"] == 0
    assert [*saved.parent.iterdir()] == [saved]


def test_a_checkpoint_with_a_hole_is_not_taken(tmp_path):
    """As where the file of one of several processes is missing: a tensor's first row is nowhere."""
    stopped(tmp_path, 3)
    (file,) = (tmp_path / "checkpoints").glob("*/*.safetensors")
    with safe_open(file, "pt") as stored:
        metadata, tensors = stored.metadata(), load_file(file)
    (key,) = (key for key, text in metadata.items() if "saved_offsets" in text)
    places = json.loads(metadata[key])
    places["model/norm.weight"]["saved_offsets"] = [1]
    save_file(tensors, file, metadata | {key: json.dumps(places)})
    with pytest.raises(ValueError, match=r"step-0000002: a part of model/norm\.weight is missing: delete it"):
        stopped(tmp_path, 3)


@pytest.mark.parametrize("loss", [True, False])
def test_what_is_no_number_stops_the_training_and_never_reaches_a_checkpoint(tmp_path, loss):
    """The loss, or the gradient alone. The step, samples and last checkpoint are named; a checkpoint would be
    due after step 5."""
    done = count()

    def backward(module, batch, processes):
        bad = next(done) == 5
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, float("nan") if bad else 1e-3)
        return {"loss": torch.tensor(float("nan") if bad and loss else 1.0), "tokens": 1}

    message = r"at step 5: .* rows \[\d+, .* of data set '(one|two)'; last good checkpoint: .*step-000000"
    with pytest.raises(FloatingPointError, match=message) as failed:
        fit(tmp_path, backward=backward)
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert str(saved) in str(failed.value)
    assert all(x.isfinite().all() for file in saved.iterdir() for x in load_file(file).values())
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2, 3, 4]


def crowd(stage, most):
    """From now on its backward pass fails where it computes more than so many tokens at a time, as on a GPU;
    half of the gradient is there by then. Returns the tries."""
    whole, tries = stage.backward, []

    def backward(*arguments):
        tries.append(row := whole(*arguments))
        if max(stage.config.memory("cpu").values()) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return row

    stage.backward = backward
    return tries


def test_what_memory_does_not_hold_is_computed_in_smaller_parts(tmp_path):
    """Halves until it fits, and stays there; the gradient of a failed try is forgotten."""
    budgets = {"token_budget": 2048, "keep_tokens": 8192}
    whole, stage = fit(tmp_path / "whole", **budgets), tiny_stages.stage("pair", **budgets)
    tries = crowd(stage, 600)
    found = trained(stage, tiny_stages.model("pair"), tmp_path / "small")
    for one, two in zip(found.parameters(), whole.parameters(), strict=True):
        assert_close(one, two)
    assert (stage.config.token_budget, stage.config.keep_tokens) == (512, 512)
    assert len(tries) == stage.config.steps + 4  # 8192, 4096, 2048 and 1024 were too many


def test_what_never_fits_is_told(tmp_path):
    stage = tiny_stages.stage("diffusion", token_budget=4096)
    crowd(stage, 0)
    with pytest.raises(torch.OutOfMemoryError, match=r"of diffusion: set .*gradient_checkpointing="):
        trained(stage, tiny_stages.model("diffusion"), tmp_path)
    blocks = tiny_stages.config("diffusion", token_budget=4096, length=2048)
    assert blocks.halved("cpu") and not replace(blocks, token_budget=2048).halved("cpu")


def test_a_disk_that_fills_up_leaves_the_previous_checkpoint_usable(tmp_path):
    """No file may grow beyond a kilobyte from step 3 on."""
    with ExitStack() as until, pytest.raises(CheckpointException, match=r"step-0000004|large|writing|I/O"):

        def fill(row):
            if row.get("step") == 3:
                until.enter_context(full_disk())

        fit(tmp_path / "parts", report=fill)
    assert_same(fit(tmp_path / "parts"), fit(tmp_path / "whole"), tmp_path)


def test_told_to_stop_by_a_file_it_saves_itself(tmp_path, monkeypatch):
    """The step under way is finished first. By a signal: test_train.py."""
    file = tmp_path / "stop"
    monkeypatch.setenv(STOP, str(file))
    options = {"checkpoint_seconds": 100}
    fit(tmp_path / "parts", report=lambda row: row.get("step") == 4 and file.touch(), **options)
    file.unlink()
    saved = [path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()]
    assert saved == ["step-0000006"]
    assert_same(fit(tmp_path / "parts", **options), fit(tmp_path / "whole", **options), tmp_path)


def test_where_a_checkpoint_takes_long_there_are_fewer(tmp_path, monkeypatch):
    """One takes a second of the tests' clock, and is due after two; then after four times what it took."""
    saved = []
    monkeypatch.setattr(loop, "RARE", 4)
    monkeypatch.setattr(loop, "save_checkpoint", lambda *arguments: saved.append(arguments[3]))
    fit(tmp_path)
    assert saved == [2, 6]


def test_gains_of_norms_do_not_decay():
    model = tiny.model()
    decayed, kept = loop.parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {id(p) for p in kept["params"]} == {id(p) for n, p in model.named_parameters() if "norm" in n}
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


SCHEDULES = {
    "wsd": {0: 0.1, 9: 1, 50: 1, 90: 1, 100: 0.5},
    "cosine": {0: 0.1, 9: 1, 10: 1, 60: 0.5},
    "linear": {0: 0.1, 9: 1, 10: 1, 35: 0.75, 60: 0.5, 109: 0.01},
}


@pytest.mark.parametrize(("schedule", "expected"), SCHEDULES.items())
def test_a_schedule_rises_and_falls_as_its_name_says(schedule, expected):
    config = tiny_stages.config("pair", steps=110, warmup=10, schedule=schedule, decay=20)
    found = [loop.lr_factor(config, step) for step in range(110)]
    assert {step: found[step] for step in expected} == pytest.approx(expected)
    assert found[10:] == sorted(found[10:], reverse=True) and 0 < found[-1] < 0.02
