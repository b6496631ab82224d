"""Attention without padding, kernel preference and compiled layers."""

import copy
from functools import partial

import pytest
import torch
from transformers import AutoModel

import tiny
import tiny_families
from closeness import assert_close
from unmask.models.attention import VARLEN, compile_layers, plain_attention, unpadded, unpadded_inputs


def rows(model, sequences):
    """Hidden states of sequences laid out in one row, and of each sequence alone."""
    tokens = [torch.from_numpy(s).long() for s in sequences]
    inputs = unpadded_inputs(model, [len(s) for s in sequences], "cpu")
    together = model(input_ids=torch.cat(tokens)[None], use_cache=False, **inputs).last_hidden_state[0]
    alone = torch.cat([model(input_ids=s[None], use_cache=False).last_hidden_state[0] for s in tokens])
    return together, alone


@pytest.mark.parametrize("bidirectional", [False, True])
def test_in_bf16_a_row_of_sequences_is_what_each_is_in_float32(bidirectional):
    model, sequences = tiny.model(bidirectional=bidirectional), tiny.sequences(6, seed=1)
    with torch.inference_mode():
        alone = rows(model, sequences)[1]
        with torch.autocast("cpu", torch.bfloat16):
            together = rows(model, sequences)[0]
    assert_close(together, alone, 5e-2)


def both_ways(model):
    """Hidden states of some tokens, without a mask and with one (what it masks: 0)."""
    tokens = torch.randint(4, 300, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(9) < torch.tensor([[9], [4], [1]])).long()
    plain, masked = (model(tokens, attention_mask=m).last_hidden_state for m in (None, mask))
    return plain, masked * mask[..., None]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_other_calls_and_checkpoints_are_what_they_were_before(bidirectional, tmp_path):
    """With and without a mask, bit for bit."""
    model = tiny.model(bidirectional=bidirectional)
    with torch.no_grad():
        before = both_ways(model)
        rows(model, tiny.sequences(2))
        after = both_ways(model)
    assert all(torch.equal(a, b) for a, b in zip(after, before))
    model.save_pretrained(tmp_path)
    assert VARLEN not in (tmp_path / "config.json").read_text()
    assert AutoModel.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_a_cpu_pads_in_float32_and_so_do_families_that_cannot_do_without():
    """GPT-Neo has attention of its own, Mistral a window."""
    assert not unpadded(tiny.model())
    families = (tiny.model, tiny_families.gpt_neo, tiny_families.mistral)
    assert [unpadded(family(), inference=True) for family in families] == [True, False, False]


@pytest.mark.parametrize("bidirectional", [False, True])
def test_plain_attention_computes_the_same(bidirectional, tmp_path):
    """With and without padding, and the checkpoint does not ask for it."""
    model = tiny.model(bidirectional=bidirectional)
    expected = tiny.with_gradients(torch.cat(both_ways(model)), model)
    plain_attention(model)
    found = tiny.with_gradients(torch.cat(both_ways(model)), model)
    assert_close(found, expected)
    model.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


def test_plain_attention_drops_what_transformers_drops():
    model = tiny.model().train()
    for layer in model.layers:
        layer.self_attn.attention_dropout = 0.5
    found = []
    for ask in (lambda one: one.set_attn_implementation("eager"), plain_attention):
        ask(model)
        torch.manual_seed(0)
        found.append(torch.cat(both_ways(model)))
    assert_close(*found)
    assert not torch.equal(torch.cat(both_ways(model)), found[1])  # drawn anew


@pytest.mark.parametrize("bidirectional", [False, True])
def test_plain_attention_reads_sequences_in_one_row_as_it_reads_each(bidirectional):
    """Also their gradients; and in one of the row's forward passes nothing is padded but for attention."""
    model, sequences = tiny.model(bidirectional=bidirectional), tiny.sequences(6, seed=3)
    plain_attention(model)
    assert unpadded(model)
    weights = torch.randn(sum(map(len, sequences)), 32, generator=torch.Generator().manual_seed(0))
    together, alone = (tiny.with_gradients(x * weights, model) for x in rows(model, sequences))
    assert_close(together, alone)


def test_compiled_layers_compute_the_same_with_two_graphs(monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = tiny.model()
    compiled = copy.deepcopy(model)
    compile_layers(compiled, same_length=True)
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
        assert_close(*results)
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
    assert_close(found.float().cpu(), expected, 5e-2)
    assert all(gradient.isfinite().all() for gradient in tiny.gradients(model).values())
