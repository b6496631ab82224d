import pytest
import torch
from transformers import AutoModel

import tiny
from unmask.models import backbone
from unmask.models.merge import slerp


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_the_last_token_reaches_the_first_position_only_without_the_causal_mask(
    tmp_path, attention, batch, padded, bidirectional
):
    path = backbone.save(tiny.model(bidirectional=bidirectional, head=True), tiny.tokenizer(), tmp_path / "m")
    model = backbone.load(path, attention=attention)
    tokens = torch.randint(4, 300, (batch, 9), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    last = 6 if padded else 8
    changed[:, last] += 1
    mask = (torch.arange(9) <= last).long().expand(batch, 9) if padded else None
    with torch.no_grad():
        before = model(tokens, attention_mask=mask).last_hidden_state[:, 0]
        after = model(changed, attention_mask=mask).last_hidden_state[:, 0]
    assert bool((before != after).any()) == bidirectional


def test_a_checkpoint_loads_with_stock_classes_and_says_what_it_is(tmp_path):
    original = tiny.model(head=True)
    path = backbone.save(original, tiny.tokenizer(), tmp_path / "m", stage="diffusion")
    loaded = AutoModel.from_pretrained(path)
    assert type(loaded).__name__ == "Qwen3Model"
    assert loaded.config.is_causal is False
    assert loaded.config.use_bidirectional_attention is True
    assert loaded.config.mask_token_id == tiny.tokenizer().convert_tokens_to_ids("<|fim_pad|>")
    assert backbone.facts(path) == {"stage": "diffusion"}
    tokens = torch.arange(4, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).last_hidden_state, original.model(tokens).last_hidden_state)


def test_a_mask_token_outside_of_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="not in the vocabulary"):
        backbone.make_bidirectional(tiny.model(bidirectional=False), tiny.tokenizer(), "<mask>")


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such directory"):
        backbone.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"is no checkpoint: config.json and \*.safetensors missing"):
        backbone.load(tmp_path)


def test_a_failed_save_leaves_the_old_checkpoint_and_nothing_else(tmp_path, monkeypatch):
    path = backbone.save(tiny.model(), tiny.tokenizer(), tmp_path / "m", stage="old")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tiny.tokenizer()), "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        backbone.save(tiny.model(seed=1), tiny.tokenizer(), path, stage="new")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert backbone.facts(path) == {"stage": "old"}


def naive_slerp(t, a, b):
    a64, b64 = a.double(), b.double()
    cosine = (a64 * b64).sum() / (a64.norm() * b64.norm())
    if cosine.abs() > 0.9995:
        return (1 - t) * a64 + t * b64
    theta = torch.arccos(cosine)
    return (torch.sin((1 - t) * theta) * a64 + torch.sin(t * theta) * b64) / torch.sin(theta)


def test_slerp_equals_the_formula_and_keeps_the_model_bidirectional(tmp_path):
    a, b = tiny.model(seed=1), tiny.model(seed=2)
    one = backbone.save(a, tiny.tokenizer(), tmp_path / "a", pooling="mean")
    two = backbone.save(b, tiny.tokenizer(), tmp_path / "b")
    merged = backbone.load(slerp(one, two, 0.3, tmp_path / "c"))
    assert merged.config.is_causal is False
    assert backbone.facts(tmp_path / "c") == {"stage": "merge", "pooling": "mean", "t": 0.3}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]
    other = dict(b.named_parameters())
    for name, parameter in a.named_parameters():
        torch.testing.assert_close(
            merged.get_parameter(name),
            naive_slerp(0.3, parameter.data, other[name].data).float(),
            atol=1e-6,
            rtol=1e-5,
        )


def test_slerp_refuses_what_it_cannot_merge(tmp_path):
    one = backbone.save(tiny.model(), tiny.tokenizer(), tmp_path / "a")
    with pytest.raises(ValueError, match="between 0 and 1"):
        slerp(one, one, 1.5, tmp_path / "c")
    with pytest.raises(ValueError, match="is no checkpoint"):
        slerp(one, tmp_path / "b", 0.5, tmp_path / "c")
