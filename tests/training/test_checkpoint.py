import shutil

import torch
from safetensors.torch import load_file

import tiny
from unmask.training.checkpoint import latest_checkpoint, remove_checkpoints, save_checkpoint

SHARD = "shard-00001-model-00001-of-00001.safetensors"


def trained():
    model = tiny.model(head=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model(torch.arange(4, 20)[None]).logits.square().mean().backward()
    optimizer.step()
    return model, optimizer


def test_a_checkpoint_holds_no_pickle_and_replaces_the_older_one(tmp_path):
    model, optimizer = trained()
    save_checkpoint(tmp_path, model, optimizer, 2, "a")
    save_checkpoint(tmp_path, model, optimizer, 4, "a")
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000004-a"]
    files = {path.name for path in (tmp_path / "step-0000004-a").iterdir()}
    assert files == {SHARD}
    assert load_file(tmp_path / "step-0000004-a" / SHARD).keys() >= {"model/model.norm.weight"}


def test_another_trainings_checkpoints_are_neither_taken_nor_touched(tmp_path):
    model, optimizer = trained()
    paid = save_checkpoint(tmp_path, model, optimizer, 4, "other")
    assert latest_checkpoint(tmp_path, "a") is None
    for number in (2, 4):
        own = save_checkpoint(tmp_path, model, optimizer, number, "a")
    assert latest_checkpoint(tmp_path, "a") == own
    assert latest_checkpoint(tmp_path, "other") == paid
    shutil.copytree(own, tmp_path / ".step-0000006-a.tmp")  # what a kill left half-written
    assert latest_checkpoint(tmp_path, "a") == own
    remove_checkpoints(tmp_path, "a")
    assert list(tmp_path.iterdir()) == [paid]
