"""The contextual encoder: what its second stage reads, and its embedder."""

import numpy as np
import pytest
import torch

import tiny
from closeness import assert_close
from unmask.data.tokens import join_chunks
from unmask.models import backbone
from unmask.models import context_encoder as cde
from unmask.models.context_encoder import ContextEmbedder, ContextualEncoder
from unmask.models.embedder import Embedder
from unmask.models.encoding import TokenSequence, after_context, encode_rows
from unmask.store import write_json

J = 4
CORPUS = ["Open a file.", "Close the stream.", "Mean of an array."]
TEXTS = ["Read a table from a file and return its rows.", "A mean.", "東京は日本の首都です。"]


def encoder(context=J):
    built = ContextualEncoder(tiny.model(seed=1), tiny.model(seed=2), context).eval()
    with torch.no_grad():  # far from what any initialisation gives
        built.second.null_D.normal_(generator=torch.Generator().manual_seed(3))
    return built


def embedder(**options):
    return ContextEmbedder(encoder(), tiny.tokenizer(), **{"device": "cpu"} | options)


def vectors(count, seed=0):
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))


def sequences(slots=J):
    texts = [TokenSequence(s) for s in tiny.sequences(5, seed=3)]
    return [after_context(s, slots) for s in [*texts, join_chunks(tiny.sequences(3, seed=4), 0)]]


@torch.no_grad()
def rows(second, context_KD, items=None, **options):
    return encode_rows(second, items or sequences(second.slots), context_KD=context_KD, **options)


def encoded(one, texts=TEXTS):
    return one.encode(texts, "float32")


def naive(second, tokens_L, context_KD):
    """A text's mean hidden state: slots and tokens laid out for the stock backbone, in float64."""
    model = second.backbone.double()
    nulls_JD = second.null_D.double().expand(second.slots - len(context_KD), -1)
    tokens_LD = model.embed_tokens.weight[torch.from_numpy(tokens_L).long()]
    position = torch.cat([torch.zeros(second.slots), torch.arange(len(tokens_L))]).long()
    inputs = torch.cat([context_KD.double(), nulls_JD, tokens_LD])[None]
    read = model(inputs_embeds=inputs, position_ids=position[None])
    return read.last_hidden_state[0, second.slots :].mean(0)


@pytest.mark.parametrize("known", [0, 3, J])
def test_the_second_stage_is_a_transformer_over_unordered_slots_and_the_text(known):
    context = vectors(known)
    items = sequences()[:5]
    found = rows(encoder().second, context, items)
    second = encoder().second
    with torch.no_grad():
        expected = [naive(second, item.tokens_L[J:], context) for item in items]
    assert_close(found.double(), torch.stack(expected))


def test_batches_with_and_without_padding_and_single_texts_agree():
    second, context = encoder().second, vectors(3)
    expected = rows(second, context)
    assert_close(rows(second, context, packed=True), expected)
    assert_close(torch.cat([rows(second, context, [item]) for item in sequences()]), expected)


def test_the_stages_share_no_weights_and_the_null_vector_learns():
    built = ContextualEncoder(tiny.model(), tiny.model(), J)
    assert len({id(p) for p in built.parameters()}) == 2 * len(list(tiny.model().parameters())) + 1
    encode_rows(built.second, sequences(), context_KD=vectors(2)).sum().backward()
    assert built.second.null_D.grad.norm() > 0
    built.zero_grad()
    encode_rows(built.second, sequences(), context_KD=vectors(J)).sum().backward()
    assert built.second.null_D.grad.norm() == 0  # there is a gradient: processes add theirs up
    two = ContextualEncoder(tiny.model(), tiny.model(), J)
    assert torch.equal(two.second.null_D, built.second.null_D)


def test_a_causal_backbone_is_refused():
    with pytest.raises(ValueError, match=r"is causal: .* bidirectional"):
        ContextualEncoder(tiny.model(), tiny.model(bidirectional=False), J)


def test_a_folder_of_something_else_is_refused(tmp_path):
    backbone.save(tiny.model(), tiny.tokenizer(), tmp_path / "plain", pooling="mean")
    for path in (tmp_path / "plain", tmp_path / "none"):
        with pytest.raises(ValueError, match=f"{path} is no contextual encoder"):
            ContextEmbedder.from_pretrained(path)
    path = cde.save(encoder(), tiny.tokenizer(), tmp_path / "contextual")
    with pytest.raises(ValueError, match="is no checkpoint"):
        Embedder.from_pretrained(path)


def test_an_embedder_gives_the_rows_of_the_two_stages():
    ready = embedder().with_context(CORPUS)
    plain = Embedder(ready.encoder.first, tiny.tokenizer(), device="cpu")
    context = torch.from_numpy(encoded(plain, CORPUS))
    tokens = [np.array(tiny.tokenizer()(t)["input_ids"], np.int32) for t in TEXTS]
    expected = rows(ready.encoder.second, context, [after_context(TokenSequence(t), J) for t in tokens])
    assert_close(encoded(ready), expected)
    documents = [join_chunks(tokens[:2], 0), join_chunks(tokens[2:], 0)]
    expected = rows(ready.encoder.second, context, [after_context(d, J) for d in documents])
    found = ready.encode_documents([TEXTS[:2], TEXTS[2:]], "float32")
    assert_close(np.concatenate(found), expected)
    late = ready.encode_tokens(TEXTS)
    assert [len(t) for t in late] == [len(t) for t in tokens]
    assert_close([t.mean(0) for t in late], encoded(ready))


def test_the_context_is_a_set_of_at_most_j_documents():
    ready = embedder()
    full, other_order = (ready.with_context(texts) for texts in ([*CORPUS, TEXTS[2]], [TEXTS[2], *CORPUS]))
    assert full.encoder is ready.encoder
    found, none = encoded(full), encoded(ready)
    assert_close(encoded(other_order), found)
    np.testing.assert_array_equal(encoded(ready.with_context([])), none)
    assert np.linalg.norm(found - none) > 1e-2 * np.linalg.norm(none)
    with pytest.raises(ValueError, match=f"at most {J} context documents are read, got 5"):
        ready.with_context(["a file"] * 5)
    with pytest.raises(ValueError, match="Text 1 of 2 has no tokens"):
        ready.with_context(["a file", ""])


def test_an_embedder_is_saved_with_its_options(tmp_path):
    ready = embedder(max_length=9, window=99, normalize=True)
    path = ready.save_pretrained(tmp_path / "model")
    assert {file.name for file in path.iterdir()} == {"first", "second", "null.safetensors", "unmask.json"}
    loaded = ContextEmbedder.from_pretrained(path, device="cpu")
    options = {"pooling": "mean", "max_length": 9, "window": 99, "special_tokens": False, "normalize": True}
    options |= {"prompts": {}}
    assert backbone.facts(path) == options | {"context": J}
    write_json(path / "unmask.json", backbone.facts(path) | {"source": "org/model", "fingerprint": "x"})
    again = ContextEmbedder.from_pretrained(path, device="cpu").save_pretrained(tmp_path / "again")
    assert backbone.facts(again) == options | {"context": J, "source": "org/model"}
    for one, two in ((ready, loaded), (ready.with_context(CORPUS), loaded.with_context(CORPUS))):
        np.testing.assert_array_equal(encoded(two), encoded(one))
    plain = Embedder.from_pretrained(path / "first", device="cpu")
    np.testing.assert_array_equal(encoded(plain), encoded(Embedder(ready.encoder.first, tiny.tokenizer())))


@pytest.mark.gpu
def test_the_gpu_gives_the_embeddings_of_the_cpu():
    expected = encoded(embedder().with_context(CORPUS))
    for half, rel in ((False, 1e-4), (True, 5e-2)):
        on_gpu = embedder(device="cuda", mixed_precision=half).with_context(CORPUS)
        assert_close(encoded(on_gpu), expected, rel)
