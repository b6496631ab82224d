"""Pooling against loops, rows of packed batches against rows of padded ones, micro-batches."""

import pytest
import torch

import tiny
import tiny_families
from closeness import assert_close
from unmask.data.tokens import join_chunks
from unmask.models import backbone, encoding
from unmask.models.encoding import TokenSequence, encode_rows, last_token_pool, mean_pool, segment_mean

HIDDEN = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(0))
RIGHT = torch.arange(7) < torch.tensor([7, 4, 1, 5])[:, None]
GAPS = torch.rand(4, 7, generator=torch.Generator().manual_seed(1)) < 0.6
CHUNKS = torch.randint(-1, 3, (4, 7), generator=torch.Generator().manual_seed(2))
MIXED = [3, 50, 7, 7, 20, 1, 120, 64, 2]
POOLS = {mean_pool: lambda x: x.mean(0), last_token_pool: lambda x: x[-1]}


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("mask", [RIGHT, RIGHT.flip(1), GAPS, GAPS.long(), torch.ones(4, 7)])
def test_mean_and_last_token_are_the_loops_and_padding_is_never_read(pool, mask):
    expected = torch.stack([POOLS[pool](hidden[keep.bool()]) for hidden, keep in zip(HIDDEN, mask)])
    assert_close(pool(HIDDEN.masked_fill(mask[..., None] == 0, torch.nan), mask), expected)
    if mask.all():
        assert_close(pool(HIDDEN), expected)


def test_the_mean_of_segments_is_the_loop():
    segments = torch.where(CHUNKS < 0, -1, CHUNKS + 4 * torch.arange(4)[:, None])
    hidden = HIDDEN.masked_fill(CHUNKS[..., None] < 0, torch.nan)  # of separators, which are not read
    means = segment_mean(hidden.flatten(0, 1), segments.flatten(), 16).view(4, 4, 5)
    for b in range(4):
        for c in range(4):
            members = HIDDEN[b][CHUNKS[b] == c]
            expected = members.mean(0) if len(members) else torch.zeros(5)
            assert_close(means[b, c], expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_sums_of_bfloat16_run_in_float32(autocast):
    hidden = torch.full((1, 4096, 2), 1.01).bfloat16()
    chunk = torch.zeros(1, 4096, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        means = mean_pool(hidden), mean_pool(hidden, chunk == 0), segment_mean(hidden[0], chunk[0], 1)
    for pooled in means:
        assert_close(pooled, hidden[:, 0].float(), 1e-6)
    assert last_token_pool(hidden).dtype == torch.float32


def texts(count=7):
    return [TokenSequence(s) for s in tiny.sequences(count, seed=3)]


def rows_and_gradients(model, sequences, **options):
    return tiny.with_gradients(encode_rows(model, sequences, **options), model)


@pytest.mark.parametrize("family", ["qwen3", "llama", "olmo2"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("chunked", "pooling"), [(False, "mean"), (False, "last"), (True, "mean")])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_batches_give_the_rows_and_gradients_of_padded_ones(
    family, checkpointing, chunked, pooling, bidirectional
):
    model = tiny_families.model(family, bidirectional=bidirectional)
    documents = [join_chunks(tiny.sequences(n, seed=n), 0) for n in (3, 1, 4)]
    sequences, read = [*texts(3), *documents, *texts(2)] if chunked else texts(), []
    model.register_forward_pre_hook(lambda _, args, named: read.append(named["input_ids"]), with_kwargs=True)
    expected, gradients = rows_and_gradients(model, sequences, pooling=pooling)
    if checkpointing:
        backbone.checkpoint_activations(model)
        model.train()
    found, packed_gradients = rows_and_gradients(model, sequences, pooling=pooling, packed=True)
    assert read[1].shape == (1, sum(map(len, sequences)))  # no padding
    assert_close(found, expected)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    assert all((packed_gradients[name] - g).norm() <= 1e-5 * norm for name, g in gradients.items())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("multiple_of", [1, 2, 3, 5, 9, 12])
@pytest.mark.parametrize("budget", [60, 128, 10**6])
def test_micro_batches_cover_everything_once_within_the_budget(budget, multiple_of, packed):
    groups = encoding.micro_batches(MIXED, budget, multiple_of, packed=packed)
    assert len(groups) % multiple_of == 0
    assert sorted(i for group in groups for i in group) == list(range(len(MIXED)))
    for group in groups:
        lengths = [MIXED[i] for i in group]
        assert lengths == sorted(lengths, reverse=True)
        tokens = sum(lengths) if packed else len(lengths) * max(lengths, default=0)
        assert len(group) <= 1 or tokens <= budget
    firsts = [MIXED[group[0]] for group in groups if len(group)]
    assert firsts == sorted(firsts, reverse=True)


GROUPS = [
    ([10, 1, 1, 1, 1], {"token_budget": 14}, [[0], [1, 2, 3, 4]]),
    ([10, 1, 1, 1, 1], {"token_budget": 14, "packed": True}, [[0, 1, 2, 3, 4]]),  # true tokens count
    ([8, 8, 4, 4, 4, 4], {"token_budget": 17, "multiple_of": 3}, [[0], [1], [2, 3, 4, 5]]),
    ([5, 6], {"token_budget": 100, "multiple_of": 4}, [[1], [0], [], []]),
]


@pytest.mark.parametrize(("lengths", "options", "groups"), GROUPS)
def test_micro_batches_by_hand(lengths, options, groups):
    assert [group.tolist() for group in encoding.micro_batches(lengths, **options)] == groups
