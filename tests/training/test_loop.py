import json
import os
import resource
import signal

import pytest
import tiny_stages
import torch

import tiny
from unmask.models import backbone
from unmask.training.loop import Preempted, exploding, finish, parameter_groups, stop_signals, train


class Interrupted(Exception):
    pass


def fit(
    folder, name="pair", *, fingerprint="a", objective=None, report=lambda row: None, signals=(), **changes
):
    settings = tiny_stages.config(name, **changes)
    stage, model = objective or tiny_stages.stage(name, settings), tiny_stages.model(name)
    return train(stage, model, settings, folder, fingerprint=fingerprint, report=report, signals=signals)


def stop_at(step):
    def report(row):
        if row.get("step") == step:
            raise Interrupted

    return report


def rows(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in found]


def assert_same_weights(one, two):
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", tiny_stages.STAGES)
def test_resumed_equals_uninterrupted(tmp_path, name, precision):
    whole = fit(tmp_path / "whole", name, precision=precision)
    # Stopped between two checkpoints, then at a step whose checkpoint is not yet written, then left alone.
    for step in (4, 5):
        with pytest.raises(Interrupted):
            fit(tmp_path / "parts", name, precision=precision, report=stop_at(step))
    seen = []
    resumed = fit(tmp_path / "parts", name, precision=precision, report=seen.append)
    assert seen[0] == {"total": 8, "done": 4}
    assert [row["step"] for row in seen[1:]] == [4, 5, 6, 7]
    assert [row["step"] for row in rows(tmp_path / "parts")] == list(range(8))
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    assert_same_weights(resumed, whole)


def test_another_training_is_not_continued(tmp_path):
    with pytest.raises(Interrupted):
        fit(tmp_path / "f", fingerprint="other", report=stop_at(5))
    seen = []
    fresh = fit(tmp_path / "f", report=seen.append)
    assert seen[0]["done"] == 0
    assert rows(tmp_path / "f") == rows_of_a_whole_run(tmp_path)
    assert_same_weights(fresh, fit(tmp_path / "again"))


def rows_of_a_whole_run(tmp_path):
    fit(tmp_path / "whole")
    return rows(tmp_path / "whole")


def test_a_kill_while_the_log_is_cleaned_loses_no_row(tmp_path, monkeypatch):
    """The log is replaced as a whole: a crash between truncating and writing would lose all earlier rows."""
    with pytest.raises(Interrupted):
        fit(tmp_path / "parts", report=stop_at(5))
    log = tmp_path / "parts" / "metrics.jsonl"
    real = type(log).write_text

    def crash(path, text, *args, **kwargs):
        if path.suffix == ".json":
            return real(path, text, *args, **kwargs)
        real(path, "", *args, **kwargs)  # what is left of a file that was opened for writing
        raise Interrupted

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(type(log), "write_text", crash)
        fit(tmp_path / "parts")
    fit(tmp_path / "parts")
    assert [row["step"] for row in rows(tmp_path / "parts")] == list(range(8))


class Poisoned:
    """A stage whose loss, or whose gradient alone, is not a number at one step."""

    def __init__(self, step, *, loss):
        self._step, self._loss = step, loss

    def batch(self, step):
        return None

    def samples(self, step):
        return {"dataset": "poison", "rows": list(range(10 * step, 10 * step + 10))}

    def module(self, model):
        return model

    def backward(self, module, batch, step, processes):
        bad = step == self._step
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, float("nan") if bad else 1e-3)
        return {"loss": torch.tensor(float("nan") if bad and self._loss else 1.0), "tokens": 1}


def test_a_loss_that_is_not_finite_stops_with_step_and_checkpoint(tmp_path):
    with pytest.raises(FloatingPointError, match=r"loss is nan at step 5: .*step-0000004"):
        fit(tmp_path / "late", objective=Poisoned(5, loss=True))
    with pytest.raises(FloatingPointError, match=r"at step 1: .*checkpoint: none"):
        fit(tmp_path / "early", objective=Poisoned(1, loss=True))


def test_what_a_loss_says_of_its_input_is_in_the_message(tmp_path):
    poisoned = Poisoned(-1, loss=False)

    def backward(module, batch, step, processes):
        raise FloatingPointError("q_ND holds NaN or infinity in 1 of 3 rows, first in row 2")

    poisoned.backward = backward
    with pytest.raises(FloatingPointError, match=r"q_ND holds NaN .* at step 0: .*data set 'poison'"):
        fit(tmp_path, objective=poisoned)


def test_a_gradient_that_is_not_finite_never_reaches_a_checkpoint(tmp_path):
    """The loss of step 5 is finite, its gradient is not: the checkpoint due after it would hold NaN."""
    with pytest.raises(FloatingPointError, match=r"step 5: .*step-0000004"):
        fit(tmp_path, objective=Poisoned(5, loss=False))
    (last,) = (tmp_path / "checkpoints").iterdir()
    assert last.name == "step-0000004-a"


def test_a_disk_that_fills_up_leaves_the_previous_checkpoint_usable(tmp_path):
    """No file may grow beyond a kilobyte from step 3 on: the system enforces it, as it does a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(row):
        if row.get("step") == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))

    try:
        with pytest.raises(OSError, match=r"step 4 not written to .* MB needed"):
            fit(tmp_path / "parts", report=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()] == ["step-0000002-a"]
    assert_same_weights(fit(tmp_path / "parts"), fit(tmp_path / "whole"))
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_a_training_finishes_its_step_and_saves_itself(tmp_path, number):
    def stop(row):
        if row.get("step") == 4:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with stop_signals() as signals, pytest.raises(Preempted) as stopped:
        fit(tmp_path / "parts", checkpoint_every=100, report=stop, signals=signals)
    assert (stopped.value.code, stopped.value.step) == (75, 6)  # the step under way is finished, then saved
    assert signal.getsignal(number) is before
    seen = []
    resumed = fit(tmp_path / "parts", checkpoint_every=100, report=seen.append)
    assert seen[0]["done"] == 6
    assert_same_weights(resumed, fit(tmp_path / "whole", checkpoint_every=100))
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")


def test_a_failure_names_the_samples_of_its_batch(tmp_path):
    with pytest.raises(FloatingPointError, match=r"rows 50, 51, .*\(10 in all\) of data set 'poison'"):
        fit(tmp_path, objective=Poisoned(5, loss=True))
    facts = json.loads((tmp_path / "stopped.json").read_text())
    assert facts["rows"] == list(range(50, 60))
    assert facts["checkpoint"].endswith("step-0000004-a")


def test_a_loss_that_explodes_stops_the_training():
    calm = [2.0 + 0.5 * (i % 3) for i in range(60)]
    assert not exploding(calm + [9.0] * 10, 4.0)  # a few bad batches
    assert exploding(calm + [11.0] * 20, 4.0)
    assert not exploding(calm + [11.0] * 20, 0)  # switched off
    assert not exploding([0.01] * 40 + [1.5] * 20, 4.0)  # below one nat there is nothing to explode from
    assert not exploding([50.0] * 39, 4.0)


def test_finish_removes_the_checkpoints_of_the_finished_training_only(tmp_path):
    with pytest.raises(Interrupted):
        fit(tmp_path, fingerprint="other", report=stop_at(5))
    backbone.save(fit(tmp_path), tiny.tokenizer(), tmp_path / "model", fingerprint="a")
    finish(tmp_path)
    finish(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000004-other"]


def test_gains_of_norms_do_not_decay():
    model = tiny.model()
    decayed, kept = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {id(p) for p in kept["params"]} == {id(p) for n, p in model.named_parameters() if "norm" in n}
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))
