import shutil

import pytest
import torch
from safetensors.torch import load_file

import tiny
from unmask.training.checkpoint import latest_checkpoint, load_checkpoint, remove_checkpoints, save_checkpoint

SHARD = "shard-00001-model-00001-of-00001.safetensors"


def trained(seed=0, device="cpu"):
    model = tiny.model(head=True, seed=seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.arange(4, 20, device=model.device)[None]).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_weights_and_moments_come_back_and_the_next_step_is_the_same(tmp_path, device):
    model, optimizer = trained(device=device)
    save_checkpoint(tmp_path, model, optimizer, 2, "a")
    other = tiny.model(head=True, seed=1).to(device)
    fresh = torch.optim.AdamW(other.parameters(), lr=1e-3, fused=True)
    assert load_checkpoint(latest_checkpoint(tmp_path, "a"), other, fresh) == 2
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert optimizer.state[one].keys() == fresh.state[two].keys()
        for key, value in optimizer.state[one].items():
            assert value.device == fresh.state[two][key].device
            assert value.dtype == fresh.state[two][key].dtype
            assert torch.equal(value, fresh.state[two][key])
    step(model, optimizer)
    step(other, fresh)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_checkpoint_holds_no_pickle_and_replaces_the_older_one(tmp_path):
    model, optimizer = trained()
    save_checkpoint(tmp_path, model, optimizer, 2, "a")
    save_checkpoint(tmp_path, model, optimizer, 4, "a")
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000004-a"]
    files = {path.name for path in (tmp_path / "step-0000004-a").iterdir()}
    assert files == {SHARD, "state.json"}
    assert load_file(tmp_path / "step-0000004-a" / SHARD).keys() >= {"model/model.norm.weight"}


def test_another_trainings_checkpoints_are_neither_taken_nor_touched(tmp_path):
    model, optimizer = trained()
    paid = save_checkpoint(tmp_path, model, optimizer, 4, "other")
    assert latest_checkpoint(tmp_path, "a") is None
    for number in (2, 4):
        own = save_checkpoint(tmp_path, model, optimizer, number, "a")
    assert latest_checkpoint(tmp_path, "a") == own
    assert latest_checkpoint(tmp_path, "other") == paid
    remove_checkpoints(tmp_path, "a")
    assert list(tmp_path.iterdir()) == [paid]


def test_what_a_kill_left_half_written_is_not_taken_and_goes_with_the_rest(tmp_path):
    model, optimizer = trained()
    last = save_checkpoint(tmp_path, model, optimizer, 2, "a")
    shutil.copytree(last, tmp_path / ".step-0000004-a.tmp")
    assert latest_checkpoint(tmp_path, "a") == last
    remove_checkpoints(tmp_path, "a")
    assert not tmp_path.exists()
