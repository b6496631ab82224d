"""What a training must show before a claim may rest on it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from unmask.evaluation.tasks import Task
from unmask.losses import contextual_loss, insent_loss
from unmask.study import gates
from unmask.study.evidence import Effect, claim
from unmask.study.report import claims_table

CONFIG = SimpleNamespace(bootstrap=200)
ABOUT = {"source": "table 1", "paper": "1", "seeds": [0], "notebook": "02_pair"}


def curve(losses, datasets=("a",)):
    return [{"loss": loss, "dataset": datasets[i % len(datasets)]} for i, loss in enumerate(losses)]


def passed(found):
    return [gate["passed"] for gate in found]


def test_a_falling_loss_passes_and_each_fault_fails_its_own_gate():
    noise = np.random.default_rng(0).normal(0, 0.05, 60)
    falling = 5 * np.exp(-np.arange(60) / 10) + 1 + noise
    assert passed(gates.learnt("x", curve(falling), math.log(255))) == [True, True, True]
    assert passed(gates.learnt("x", curve(falling), 0.5)) == [True, False, True]
    assert passed(gates.learnt("x", curve(falling[::-1]), 9.0)) == [False, True, False]
    back = np.concatenate([falling[:40], np.linspace(1, 4, 20)])
    assert passed(gates.learnt("x", curve(back), 9.0)) == [True, True, False]


def test_data_sets_of_different_levels_do_not_count_as_a_rise():
    easy, hard = 1 + 2 * np.exp(-np.arange(30) / 5), 4 + 2 * np.exp(-np.arange(30) / 5)
    rows = curve(np.concatenate([easy, hard]))
    for row in rows[30:]:
        row["dataset"] = "b"  # comes last, and is harder
    found = gates.learnt("x", rows, 9.0)
    assert found[0]["value"] < sum(row["loss"] for row in rows) / 60
    assert found[2]["passed"]


def test_a_smoke_trainings_few_steps_have_gates_too():
    for steps in (1, 2, 3, 6):
        assert len(gates.learnt("x", curve(np.linspace(3, 2, steps)), 9.0)) == 3


@pytest.mark.parametrize(
    ("nats", "beats", "expected"),
    [
        ({"0.05": 2.5, "1.0": 9.0}, True, [True, True]),
        ({"0.05": 3.5, "1.0": 9.0}, True, [True, False]),
        ({"0.05": 3.5, "1.0": 9.0}, False, [True]),
        ({"0.05": 7.4, "1.0": 7.5}, False, [False]),
    ],
)
def test_a_denoiser_uses_what_is_left_of_the_text(nats, beats, expected):
    assert passed(gates.denoises(nats, 2.9, 4.0, beats=beats)) == expected


def test_a_model_at_chance_is_found_out():
    task = Task("t", "english", ["q"] * 200, [[str(i)] for i in range(50)], [{i % 50} for i in range(200)])
    rng = np.random.default_rng(0)
    good = gates.above_chance("good", {"t": rng.uniform(0.2, 0.9, 200)}, [task], CONFIG)
    random = rng.random((200, 50)).argsort(1).argsort(1)[np.arange(200), np.arange(200) % 50]
    chance = gates.above_chance(
        "random", {"t": np.where(random < 10, 1 / np.log2(random + 2), 0)}, [task], CONFIG
    )
    assert good["passed"] and not chance["passed"]


def test_a_claim_on_a_training_that_failed_is_invalid_and_says_why():
    effect = Effect(0.1, np.linspace(0.05, 0.15, 100))
    well, badly = gates.at_least("slope", 5.0, 4.0), gates.at_least("slope", 0.1, 4.0)
    assert claim("It helps.", effect=effect, above=0, gates=[well], **ABOUT)["verdict"] == "reproduced"
    line = claim("It helps.", effect=effect, above=0, gates=[well, badly], **ABOUT)
    assert line["verdict"] == "invalid" and line["gates"] == [well, badly]
    assert "**invalid** (slope: 0.1, not >= 4)" in claims_table([line])
    assert [row["passed"] for row in gates.table(line["gates"])] == ["yes", "**no**"]


def test_a_guess_in_the_contextual_stage_is_the_loss_of_equal_similarities():
    """Every text the same: each softmax is as wide as its denominator."""
    n, chunks = 6, 4
    q_ND, chunks_MCD, documents_MD = torch.ones(n, 8), torch.ones(n, chunks, 8), torch.ones(n, 8)
    of, gold = torch.arange(n), torch.arange(n) % chunks
    stage = SimpleNamespace(objective="pplx", batch=n, chunks=chunks, alpha=0.2, beta_end=0.5)
    nothing = contextual_loss(q_ND, chunks_MCD, documents_MD, of, gold, beta=0.5, alpha=0.2)
    # The global term ranks the batch's queries, too, which a guess needs not count.
    queries = 0.5 * (math.log(2 * n - 1) - math.log(n))
    assert gates.contextual_guess(stage) == pytest.approx(float(nothing) - queries, rel=1e-5)
    stage.objective, stage.alpha = "insent", 0.0
    batch_only = float(insent_loss(q_ND, chunks_MCD, of, gold, lam=0.0))
    assert batch_only <= gates.contextual_guess(stage) == pytest.approx(math.log(n * chunks))
