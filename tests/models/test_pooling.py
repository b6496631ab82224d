"""Pooling: against loops, for both padding sides, in low precision, with gradients."""

import pytest
import torch

from unmask.models.pooling import last_token_pool, late_chunk_pool, mean_pool, segment_mean

HIDDEN = torch.randn(4, 7, 5, generator=torch.Generator().manual_seed(0))
LENGTHS = [7, 4, 1, 5]
RIGHT = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
MASKS = {
    "right": RIGHT,
    "left": RIGHT.flip(1),
    "gaps": torch.rand(4, 7, generator=torch.Generator().manual_seed(1)) < 0.6,
}


@pytest.mark.parametrize("side", MASKS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_mean_and_last_token_are_the_loops(side, dtype):
    mask = MASKS[side]
    for pool, of_tokens in ((mean_pool, lambda x: x.mean(0)), (last_token_pool, lambda x: x[-1])):
        expected = torch.stack([of_tokens(hidden[keep]) for hidden, keep in zip(HIDDEN, mask)])
        torch.testing.assert_close(pool(HIDDEN, mask.to(dtype)), expected)


@pytest.mark.parametrize("pool", [mean_pool, last_token_pool])
def test_no_mask_means_no_padding(pool):
    torch.testing.assert_close(pool(HIDDEN), pool(HIDDEN, torch.ones(4, 7)))


@pytest.mark.parametrize("pool", [mean_pool, last_token_pool])
def test_padding_is_never_read(pool):
    poisoned = HIDDEN.masked_fill(~RIGHT[..., None], torch.nan)
    torch.testing.assert_close(pool(poisoned, RIGHT), pool(HIDDEN, RIGHT))


@pytest.mark.parametrize("autocast", [False, True])
def test_sums_of_bfloat16_run_in_float32(autocast):
    hidden = torch.full((1, 4096, 2), 1.01).bfloat16()
    chunk = torch.zeros(1, 4096, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        for pooled in (
            mean_pool(hidden),
            mean_pool(hidden, chunk == 0),
            late_chunk_pool(hidden, chunk, 1)[:, 0],
            segment_mean(hidden[0], chunk[0], 1),
        ):
            assert pooled.dtype == torch.float32
            torch.testing.assert_close(pooled, hidden[:, 0].float(), rtol=1e-6, atol=0)
    assert last_token_pool(hidden).dtype == torch.float32


def test_late_chunking_is_the_loop():
    generator = torch.Generator().manual_seed(2)
    chunk = torch.randint(-1, 3, (4, 7), generator=generator)
    pooled = late_chunk_pool(HIDDEN, chunk, 4)
    assert pooled.shape == (4, 4, 5)
    for b in range(4):
        for c in range(4):
            members = HIDDEN[b][chunk[b] == c]
            expected = members.mean(0) if len(members) else torch.zeros(5)
            torch.testing.assert_close(pooled[b, c], expected)
    assert pooled[:, 3].eq(0).all()


def test_the_mean_of_segments_is_the_loop():
    hidden = HIDDEN.flatten(0, 1)
    segment = torch.randint(-1, 4, (28,), generator=torch.Generator().manual_seed(4))
    pooled = segment_mean(hidden.masked_fill(segment[:, None] < 0, torch.nan), segment, 5)
    for index in range(4):
        torch.testing.assert_close(pooled[index], hidden[segment == index].mean(0))
    assert pooled.shape == (5, 5) and pooled[4].eq(0).all()


def test_one_chunk_is_mean_pooling_and_outsiders_are_never_read():
    chunk = torch.where(RIGHT, 0, -1)
    poisoned = HIDDEN.masked_fill(~RIGHT[..., None], torch.nan)
    torch.testing.assert_close(late_chunk_pool(poisoned, chunk, 1)[:, 0], mean_pool(HIDDEN, RIGHT))


def test_gradients_by_finite_differences():
    hidden = HIDDEN.double().requires_grad_()
    chunk = torch.randint(-1, 3, (4, 7), generator=torch.Generator().manual_seed(3))
    assert torch.autograd.gradcheck(lambda x: mean_pool(x, RIGHT), hidden)
    assert torch.autograd.gradcheck(lambda x: last_token_pool(x, RIGHT), hidden)
    assert torch.autograd.gradcheck(lambda x: late_chunk_pool(x, chunk, 3), hidden)
    assert torch.autograd.gradcheck(lambda x: segment_mean(x.flatten(0, 1), chunk.flatten(), 3), hidden)


@pytest.mark.parametrize("pool", [mean_pool, last_token_pool])
def test_a_text_without_tokens_is_refused(pool):
    mask = RIGHT.clone()
    mask[2] = False
    with pytest.raises(ValueError, match="Sequence 2 has no token to pool"):
        pool(HIDDEN, mask)
    with pytest.raises(ValueError, match="no token"):
        pool(HIDDEN[:, :0])
    with pytest.raises(ValueError, match=r"mask must be \(4, 7\)"):
        pool(HIDDEN, mask[:, 1:])


def test_wrong_chunk_indices_are_refused():
    chunk = torch.zeros(4, 7, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"must lie in -1\.\.2.*0\.\.3"):
        late_chunk_pool(HIDDEN, chunk.index_fill(1, torch.tensor([0]), 3), 3)
    with pytest.raises(ValueError, match=r"must lie in -1\.\.2"):
        late_chunk_pool(HIDDEN, chunk - 2, 3)
    with pytest.raises(ValueError, match=r"must be \(4, 7\)"):
        late_chunk_pool(HIDDEN, chunk[:1], 3)
