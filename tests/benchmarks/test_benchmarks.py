"""The benchmarks compare like with like."""

import json

import contrastive
import diffusion
import encode
import first_gpu
import numpy as np
import pytest
import run
import search
import steps
import torch

import tiny
from closeness import assert_close
from unmask.store import link, write_atomic


def columns(seed: int = 0) -> contrastive.Columns:
    rng = np.random.default_rng(seed)
    ids = [rng.integers(4, 90, length).astype(np.int32) for length in rng.integers(2, 20, 12)]
    return ids[:6], ids[6:]


def test_all_programs_compute_the_same_loss_and_gradient():
    model = contrastive.bidirectional(1, vocabulary=90)
    programs, missing = contrastive.programs(model, columns(), bf16=False)
    assert set(programs) | set(missing) == {"unmask", "sentence-transformers", "GradCache", "uncached"}
    programs["unmask"]["small"] = lambda: contrastive.ours(model, columns(), 20)
    programs["sentence-transformers"]["small"] = contrastive.sentence_transformers(
        model, columns(), mini_batch_size=2
    )
    contrastive.agree(model, programs)


def test_the_diffusion_steps_compare_equal_losses():
    case = diffusion.diffusion_case(3, 40, 50, contrastive.PRESET.backbone)
    case.check()
    ours, full = (program[""]() for program in case.programs.values())
    assert_close(ours, full, 2e-2)
    assert case.work == 120


@pytest.mark.parametrize("bf16", [False, True][: len(encode.PRECISIONS)])
def test_both_encoders_give_the_same_vectors(bf16):
    ours, peer = encode.embedders(tiny.tokenizer(), 2, bf16=bf16)
    encode.agree(ours, peer, tiny.TEXTS, bf16=bf16)


@pytest.mark.parametrize("kind", search.KINDS)
def test_peers_find_the_same_documents(kind):
    case = search.case(kind, 64, 3000)
    case.check()
    for variants in case.programs.values():
        variants[""]()


def test_every_row_that_is_known_can_be_measured_again():
    known = json.loads((run.repository() / "results" / "benchmarks" / "benchmarks.json").read_text())
    assert {row["command"].split()[-1] for row in known} <= set(run.SUBJECTS)


@pytest.mark.parametrize("command", ["kernels", "steps"])
def test_the_first_hour_on_a_gpu_runs_at_toy_size_here(command, capsys):
    measured = [row for row in first_gpu.main([command, "--small"]) if "why" not in row]
    assert len(measured) >= 3
    if command == "kernels":
        assert max(max(row["errors"]) for row in measured) < 0.02
    else:
        assert {row["step"] for row in steps.best(measured)} == {"diffusion", "pair", "contextual"}
        assert all(row["rate"] * row["mfu"] > 0 == row["graphs_after_warm_up"] for row in measured)
        assert capsys.readouterr().out.count("| **") == 3
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            first_gpu.main([command])


def test_losses_of_a_run_are_found(tmp_path):
    for step in (1, 2):  # the link leads to the last
        home = tmp_path / "gpu-ddp" / "02_pair" / "pair" / f"f{step}"
        write_atomic(home / "metrics.jsonl", json.dumps({"loss": step}) + "\n")
        (home / "model").mkdir()
        link(home.parent / "model", home / "model")
    assert first_gpu.losses("gpu-ddp") == {"02_pair/pair": [2]}


@pytest.mark.slow
def test_a_model_that_is_held_in_parts_is_measured():
    row = first_gpu.held("diffusion", 1, "fsdp2", "smoke")
    assert row["name"] == "diffusion, fsdp2 on 1" and row["rate"] > 0


@pytest.mark.slow
def test_both_sittings_run_at_toy_size_and_keep_what_is_done_when_time_is_up():
    decided, *notebooks = first_gpu.main(["decide", "--small"])
    assert decided["status"] == 0 and [row["name"][:2] for row in notebooks] == ["00", "01", "07"]
    begun, *done = first_gpu.main(["recipe", "--small"])
    assert begun["status"] in (0, 75)  # done, or stopped in good order
    assert [row["name"][:2] for row in done][:2] == ["00", "01"]  # of decide
