"""Micro-batches, and rows of packed batches against rows of padded ones."""

import numpy as np
import pytest
import torch

import tiny
from unmask.data.tokens import join_chunks
from unmask.models import encoding
from unmask.models.embedder import Embedder
from unmask.models.encoding import TokenSequence, context_windows, encode_rows, micro_batches

MIXED = [3, 50, 7, 7, 20, 1, 120, 64, 2]


def texts(count=7):
    return [TokenSequence(s) for s in tiny.sequences(count, seed=3)]


def documents_and_queries():
    documents = [join_chunks(tiny.sequences(n, seed=n), 0) for n in (3, 1, 4)]
    return [*texts(3), *documents, *texts(2)]


def rows_and_gradients(model, sequences, **options):
    model.zero_grad()
    rows = encode_rows(model, sequences, **options)
    (rows * torch.linspace(-1, 1, rows.numel()).view_as(rows)).sum().backward()
    return rows.detach(), tiny.gradients(model)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    ("sequences", "pooling"),
    [(texts(), "mean"), (texts(), "last"), (documents_and_queries(), "mean")],
    ids=["mean", "last", "late chunking"],
)
def test_packed_batches_give_the_rows_and_gradients_of_padded_ones(sequences, pooling, bidirectional):
    model = tiny.model(bidirectional=bidirectional)
    expected, gradients = rows_and_gradients(model, sequences, pooling=pooling)
    found, packed_gradients = rows_and_gradients(model, sequences, pooling=pooling, packed=True)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert packed_gradients.keys() == gradients.keys()
    norm = torch.stack([g.norm() for g in gradients.values()]).norm()
    for name, gradient in gradients.items():
        assert (packed_gradients[name] - gradient).norm() <= 1e-5 * norm


def test_packed_batches_hold_no_padding(monkeypatch):
    model, sequences, shapes = tiny.model(), texts(), []
    model.register_forward_pre_hook(
        lambda module, _, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    encode_rows(model, sequences, packed=True)
    monkeypatch.setattr(encoding, "unpadded", lambda model: True)
    encode_rows(model, sequences)  # the default follows what model and machine can do
    assert shapes == [(1, sum(map(len, sequences)))] * 2
    encode_rows(model, [sequences[0]] * 3, packed=True)  # nothing to pad
    assert shapes[-1] == (3, len(sequences[0]))


def test_the_embedder_gives_the_same_with_and_without_padding(monkeypatch):
    texts = ["A file.", "Open the file and read all of its rows.", "Mean of an array along an axis."]
    documents = [texts[:2], texts]
    masks = []

    def embed():
        model = tiny.model()
        model.register_forward_pre_hook(
            lambda module, _, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
        embedder = Embedder(model, tiny.tokenizer(), device="cpu")
        tokens = [*embedder.encode_tokens(texts), *embedder.encode_document_tokens(documents)[1]]
        return [embedder.encode(texts, "float32"), *embedder.encode_documents(documents, "float32"), *tokens]

    packed = embed()
    assert len(masks) == 4 and all(mask.numel() == 0 for mask in masks)  # varlen: no padding mask
    monkeypatch.setattr("unmask.models.embedder.unpadded", lambda model, inference: False)
    for found, expected in zip(embed(), packed, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert all(isinstance(mask, torch.Tensor) for mask in masks[4:])


def test_autocast_keeps_the_pooling_in_float32():
    model = tiny.model()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        packed, padded = (encode_rows(model, texts(), packed=packed) for packed in (True, False))
    assert packed.dtype == padded.dtype == torch.float32
    torch.testing.assert_close(packed, padded, atol=2e-2, rtol=2e-2)


def test_a_wrapped_model_is_packed_too():
    """DDP keeps the model in `module` and passes keyword arguments through."""

    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, **kwargs):
            return self.module(**kwargs)

    with torch.no_grad():
        expected = encode_rows(tiny.model(), texts())
        found = encode_rows(Wrapper(tiny.model()), texts(), packed=True)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_chunks_cannot_be_pooled_at_their_last_token():
    with pytest.raises(ValueError, match="has no late chunking"):
        encode_rows(tiny.model(), documents_and_queries(), pooling="last")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("multiple_of", [1, 2, 3, 5, 9, 12])
@pytest.mark.parametrize("budget", [60, 128, 10**6])
def test_micro_batches_cover_everything_once_within_the_budget(budget, multiple_of, packed):
    groups = micro_batches(MIXED, budget, multiple_of, packed=packed)
    assert len(groups) % multiple_of == 0
    assert sorted(i for group in groups for i in group) == list(range(len(MIXED)))
    for group in groups:
        lengths = [MIXED[i] for i in group]
        assert lengths == sorted(lengths, reverse=True)
        tokens = sum(lengths) if packed else len(lengths) * max(lengths, default=0)
        assert len(group) <= 1 or tokens <= budget
    firsts = [MIXED[group[0]] for group in groups if len(group)]
    assert firsts == sorted(firsts, reverse=True)


def test_packed_micro_batches_count_true_tokens():
    assert [len(g) for g in micro_batches([10, 1, 1, 1, 1], 14)] == [1, 4]
    assert [len(g) for g in micro_batches([10, 1, 1, 1, 1], 14, packed=True)] == [5]


def test_the_group_with_most_tokens_is_halved():
    assert [g.tolist() for g in micro_batches([8, 8, 4, 4, 4, 4], 17)] == [[0, 1], [2, 3, 4, 5]]
    assert [g.tolist() for g in micro_batches([8, 8, 4, 4, 4, 4], 17, 3)] == [[0], [1], [2, 3, 4, 5]]
    assert [g.tolist() for g in micro_batches([8, 8, 4, 4, 4, 4], 17, 4)] == [[0], [1], [2, 3], [4, 5]]


def test_empty_groups_fill_up_where_sequences_run_out():
    groups = micro_batches([5, 6], 100, 4)
    assert [g.tolist() for g in groups] == [[1], [0], [], []]
    assert all(np.issubdtype(g.dtype, np.integer) for g in groups)


def test_windows_of_a_document_that_fits_are_one():
    ((start, stop, chunks),) = context_windows([3, 4, 1], 10, 35)
    assert (start, stop, chunks.tolist()) == (0, 3, [0, 1, 2])


def test_a_chunk_belongs_to_the_window_where_it_has_most_context():
    # Windows 0-4, 3-7, 6-8 of ten tokens with separators; chunk 3 has 6 tokens before it in the first one and
    # 2 after it, none before it in the second; 4 has none after it, then 2 before it.
    found = [(start, stop, chunks.tolist()) for start, stop, chunks in context_windows([1] * 9, 10, 2)]
    assert found == [(0, 5, [0, 1, 2, 3]), (3, 8, [4, 5, 6]), (6, 9, [7, 8])]


def test_fewer_chunks_overlap_where_a_window_holds_fewer():
    # Beside the large chunk there is room for two.
    spans = [(start, stop) for start, stop, _ in context_windows([1, 1, 1, 6, 1, 1, 1], 10, 3)]
    assert spans == [(0, 3), (1, 4), (2, 5), (3, 6), (4, 7)]
    assert [(a, b) for a, b, _ in context_windows([5, 5, 5], 5, 3)] == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("overlap", [0, 1, 3, 35])
def test_every_chunk_belongs_to_one_window_and_windows_keep_their_size(overlap):
    rng = np.random.default_rng(overlap)
    for _ in range(50):
        lengths = rng.integers(1, 12, rng.integers(1, 60))
        windows = context_windows(lengths, 30, overlap)
        assert sorted(chunk for *_, chunks in windows for chunk in chunks) == list(range(len(lengths)))
        for start, stop, chunks in windows:
            assert lengths[start:stop].sum() + stop - start - 1 <= 30
            assert ((chunks >= start) & (chunks < stop)).all() and (np.diff(chunks) > 0).all()
