"""Compiled layers: few graphs, few launches, the same values."""

import copy
import itertools
import shutil
from functools import partial

import pytest
import torch
import torch._inductor.config as inductor

import launches
import tiny
from closeness import assert_close
from unmask.models import backbone
from unmask.models.attention import compile_layers, unpadded_inputs

MIXED = [
    [28, 13, 25],
    [29, 14, 2],
    [9],
    [17, 16, 13, 30, 26],
    [1, 5],
    [6, 6, 6],
    [2, 2],
    [25, 4],
    [20, 26, 9, 8],
]


@pytest.fixture
def as_on_a_gpu():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with launches.as_on_a_gpu():
        yield


def hidden(model, lengths):
    tokens = torch.randint(4, 300, (1, sum(lengths)), generator=torch.Generator().manual_seed(len(lengths)))
    inputs = unpadded_inputs(model, lengths, "cpu")
    return model(input_ids=tokens, use_cache=False, **inputs).last_hidden_state


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_graphs_serve_any_mixture_of_lengths(checkpointing, as_on_a_gpu, monkeypatch):
    """One with and one without gradients, over sequences of mixed lengths, of one length, and alone."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = tiny.model().train()
    if checkpointing:
        backbone.checkpoint_activations(model)
    compiled = copy.deepcopy(model)
    compile_layers(compiled, same_length=False)
    again = copy.deepcopy(model)  # the next training's, in the same process
    compile_layers(again, same_length=False)
    for own, lengths in zip(itertools.cycle([compiled, again]), MIXED):
        results = []
        for network in (own, model):
            with torch.no_grad():
                alone = hidden(network, lengths)
            results.append((alone, *tiny.with_gradients(hidden(network, lengths), network)))
        assert_close(*results)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


def test_weights_in_bfloat16_are_never_cast():
    half, single = launches.eager(torch.bfloat16), launches.eager(torch.float32)
    assert [one["products"] for one in (*half, *single)] == [7, 14, 7, 14]
    assert [one["casts of weights"] for one in (*half, *single)] == [0, 0, 7, 0]
    assert [one["casts"] for one in half] == [8, 8]  # of the four norms, which compute in float32


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler on this machine")
def test_a_compiled_layer_launches_a_quarter_and_computes_the_same(as_on_a_gpu):
    part, inputs = launches.layer(torch.bfloat16)
    compiled = copy.deepcopy(part)
    compile_layers(compiled, same_length=False)
    # Without vector instructions the C++ compiler has half the work.
    with launches.after_fusion() as counts, inductor.patch("cpp.simdlen", 1):
        for lengths in ([5, 2, 4], [7, 1]):
            arguments = inputs(lengths)
            results = [tiny.with_gradients(one(**arguments), one) for one in (compiled, part)]
            assert_close(*results, 2e-2)
    assert len(counts) == 2 and sum(counts) <= 50  # forward and backward; asked for: 70


def test_without_a_compiler_layers_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    model = tiny.model()
    with pytest.warns(UserWarning, match=r"need g\+\+ and .*Python\.h: trained without"):
        compile_layers(model, same_length=True)
    assert not any(layer._compiled_call_impl for layer in backbone.layers(model))
