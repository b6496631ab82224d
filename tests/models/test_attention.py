"""Attention without padding, kernel preference and compiled layers."""

import copy
import shutil

import pytest
import torch
from torch.nn.attention import SDPBackend
from transformers import AutoModel

import tiny
from unmask.models.attention import VARLEN, compile_layers, fast_attention, unpadded, unpadded_inputs


def rows(model, sequences):
    """Hidden states of sequences laid out in one row, and of each sequence alone."""
    tokens = [torch.from_numpy(s).long() for s in sequences]
    together = model(
        input_ids=torch.cat(tokens)[None],
        use_cache=False,
        **unpadded_inputs(model, [len(s) for s in sequences], "cpu"),
    ).last_hidden_state[0]
    alone = torch.cat([model(input_ids=s[None], use_cache=False).last_hidden_state[0] for s in tokens])
    return together, alone


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_sequences_in_one_row_do_not_see_each_other(bidirectional, checkpointing):
    model = tiny.model(bidirectional=bidirectional)  # two query heads share one key-value head
    if checkpointing:
        model.activation_checkpointing_enable()
        model.train()
    results = []
    for part in (0, 1):
        model.zero_grad()
        hidden = rows(model, tiny.sequences(6, seed=1))[part]
        (hidden * torch.linspace(-1, 1, hidden.shape[1])).sum().backward()
        results.append((hidden.detach(), tiny.gradients(model)))
    (together, found), (alone, expected) = results
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_other_calls_compute_what_they_did_before(bidirectional):
    """With and without a mask, bit for bit."""
    model = tiny.model(bidirectional=bidirectional)
    tokens = torch.randint(4, 300, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9) < torch.tensor([[9], [4], [1]])).long()
    with torch.no_grad():
        before = [model(tokens, attention_mask=m).last_hidden_state for m in (None, mask)]
        rows(model, tiny.sequences(2))
        assert model.config._attn_implementation == VARLEN
        after = [model(tokens, attention_mask=m).last_hidden_state for m in (None, mask)]
    assert all(torch.equal(a, b) for a, b in zip(after, before))


def test_the_attention_is_not_written_into_checkpoints(tmp_path):
    model = tiny.model()
    rows(model, tiny.sequences(2))
    model.save_pretrained(tmp_path)
    assert VARLEN not in (tmp_path / "config.json").read_text()
    assert AutoModel.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_a_cpu_pads():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not unpadded(tiny.model())


@pytest.mark.parametrize("change", [{"_attn_implementation": "eager"}, {"attention_dropout": 0.1}])
def test_other_attention_is_refused(change):
    model = tiny.model()
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match="pad its batches"):
        unpadded_inputs(model, [3, 4], "cpu")


def test_kernels_are_preferred_on_hopper_only(monkeypatch):
    query = torch.zeros(1, 1, 2, 4)
    with fast_attention():  # here, or where there is no GPU at all
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, chosen in {(8, 0): None, (9, 0): SDPBackend.CUDNN_ATTENTION}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        before = torch._C._get_sdp_priority_order()
        with fast_attention():
            first = torch._C._get_sdp_priority_order()[0]
        assert first == (before[0] if chosen is None else chosen.value)
        assert torch._C._get_sdp_priority_order() == before


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler on this machine")
def test_compiled_layers_compute_the_same_with_two_graphs():
    model = tiny.model()
    compiled = copy.deepcopy(model)
    compile_layers(compiled)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for length in (7, 12, 30, 19):
        tokens = torch.randint(4, 300, (2, length), generator=torch.Generator().manual_seed(length))
        results = []
        for network in (model, compiled):
            network.zero_grad()
            loss = network(tokens, use_cache=False).last_hidden_state.square()[..., 0].mean()
            loss.backward()
            results.append((loss.detach(), tiny.gradients(network)))
        (loss, expected), (found_loss, found) = results
        torch.testing.assert_close(found_loss, loss, atol=1e-5, rtol=1e-5)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
    # One for the first length, one for all the others; none for the second layer.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@pytest.mark.gpu
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_gpus_kernel_equals_the_cpus_loop(bidirectional):
    model = tiny.model(bidirectional=bidirectional)
    sequences = tiny.sequences(6, seed=2)
    expected = rows(model, sequences)[0]
    model.cuda()
    tokens = torch.cat([torch.from_numpy(s).long() for s in sequences])[None].cuda()
    with torch.autocast("cuda", torch.bfloat16):
        assert unpadded(model)
        inputs = unpadded_inputs(model, [len(s) for s in sequences], "cuda")
        found = model(input_ids=tokens, use_cache=False, **inputs).last_hidden_state[0]
        found.sum().backward()
    torch.testing.assert_close(found.float().cpu(), expected, atol=5e-2, rtol=5e-2)
    assert all(gradient.isfinite().all() for gradient in tiny.gradients(model).values())
