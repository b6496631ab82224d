import copy
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from unmask.models.reranker import (
    AROUND_DOCUMENT,
    INSTRUCTION,
    SYSTEM,
    TAIL,
    Reranker,
    answers,
    around_query,
    chat_template,
)

QUERIES = ["How do I open a file?", "東京 ", "  two\n\nlines: ", "1 + 1 =", "(x)", "naïve"]
DOCUMENTS = [
    "def close(self): return self.stream.close()",
    "no",
    " spaces around \n",
    "yes? " * 9,
    "",
    "«東京».",
]


def model(length=1024):
    """A causal one with room for a prompt, and weights large enough for scores that differ."""
    built = tiny.model(bidirectional=False, head=True)
    built.config.max_position_embeddings = length
    with torch.no_grad():
        for layer in built.model.layers:
            for parameter in layer.parameters():
                parameter.mul_(5 if parameter.ndim == 2 else 1)
    return built


def reranker(**options):
    return Reranker(model(), tiny.tokenizer(), **options)


def text(query, document, instruction=INSTRUCTION):
    """The prompt as the released models' cards print it."""
    return (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def naive(one, prompt_ids):
    """The score from all logits of transformers' own model, of one prompt that is not padded."""
    with torch.inference_mode():
        logits_V = one.model(torch.tensor([prompt_ids])).logits[0, -1].double()
    yes, no = answers(one.tokenizer.backend_tokenizer)
    return float(logits_V[yes].exp() / (logits_V[yes].exp() + logits_V[no].exp()))


def ids(one, written):
    return one.tokenizer(written, add_special_tokens=False).input_ids


def test_a_score_computed_by_hand():
    """Layers that add nothing leave the normalised embedding of the last token."""
    one = reranker()
    yes, no = answers(one.tokenizer.backend_tokenizer)
    last = ids(one, TAIL)[-1]
    with torch.no_grad():
        for layer in one.model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        table_VD = one.model.get_input_embeddings().weight.zero_()
        table_VD[last, :4] = torch.tensor([1.0, 1.0, -1.0, 1.0])  # mean square 4/32: divided by √(1/8)
        table_VD[yes, :3] = torch.tensor([0.1, 0.2, 0.3])  # (0.1 + 0.2 − 0.3) · √8 = 0
        table_VD[no, :3] = torch.tensor([0.0, -0.5, 0.0])  # −0.5 · √8 = −√2
    assert one.score("any", ["document"]) == pytest.approx(1 / (1 + np.exp(-np.sqrt(2))), rel=1e-4)
    assert one.log_odds("any", ["document"]) == pytest.approx(np.sqrt(2), rel=1e-4)


@pytest.mark.parametrize("query", QUERIES)
def test_scores_are_the_softmax_of_a_whole_prompt_read_alone(query):
    """Neither the shared start, nor padding, nor the micro-batches, nor tokenising in halves change them."""
    one = reranker(token_budget=600)
    expected = [naive(one, ids(one, text(query, document))) for document in DOCUMENTS]
    found = one.score(query, DOCUMENTS)
    assert np.ptp(expected) > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-5)
    one.token_budget = 1
    np.testing.assert_allclose(one.score(query, DOCUMENTS), expected, atol=1e-5)


def test_another_instruction_is_read():
    one = reranker(instruction="Find code")
    expected = naive(one, ids(one, text("a query", "a text", "Find code")))
    np.testing.assert_allclose(one.score("a query", ["a text"]), expected, atol=1e-5)
    np.testing.assert_allclose(
        one.score("a query", ["a text"], instruction=INSTRUCTION),
        naive(one, ids(one, text("a query", "a text"))),
        atol=1e-5,
    )


@pytest.mark.parametrize("query", ["short?", "a long query? " * 40])
@pytest.mark.parametrize("document", ["short", "a long document " * 40])
@pytest.mark.parametrize("lengths", [{}, {"query_length": 9, "document_length": 11}])
def test_what_is_too_long_loses_the_end_of_its_text_and_never_the_prompt(query, document, lengths):
    one = reranker()
    start, link = ids(one, text(query, "").removesuffix(TAIL)), ids(one, "\n<Document>:")
    end, tail = ids(one, " " + document + TAIL), ids(one, TAIL)
    fixed = len(ids(one, text("", "")))
    one.max_length = fixed + 50
    start = start[:-1]  # the space, which is the document's
    head = fixed - len(link) - len(ids(one, " ")) - len(tail)
    if len(start) > (most := head + len(link) + lengths.get("query_length", 49)):
        start = start[: most - len(link)] + link
    if len(end) > (
        most := min(one.max_length - len(start), 1 + len(tail) + lengths.get("document_length", 99))
    ):
        end = end[: most - len(tail)] + tail
    assert len(start) + len(end) <= one.max_length
    assert one.score(query, [document], **lengths) == pytest.approx(naive(one, start + end), abs=1e-5)


def test_ranking_is_by_score_and_equal_ones_keep_their_order():
    one = reranker()
    score = one.score("q", DOCUMENTS)
    ranked = one.rerank("q", DOCUMENTS)
    assert [index for index, _ in ranked] == np.argsort(-score).tolist()
    assert [value for _, value in ranked] == sorted(score, reverse=True)
    assert one.rerank("q", DOCUMENTS, top=2) == ranked[:2]
    assert one.rerank("q", []) == []
    with torch.no_grad():
        one.model.get_input_embeddings().weight[list(answers(one.tokenizer.backend_tokenizer))] = 0
    assert one.rerank("q", DOCUMENTS) == [(index, 0.5) for index in range(len(DOCUMENTS))]


def test_a_saved_reranker_is_a_language_model_and_a_cross_encoder(tmp_path):
    from sentence_transformers import CrossEncoder

    one = reranker(instruction='Find "code", or\\and text')
    expected = one.score(QUERIES[0], DOCUMENTS)
    one.save_pretrained(tmp_path / "model")
    again = Reranker.from_pretrained(tmp_path / "model")
    np.testing.assert_array_equal(again.score(QUERIES[0], DOCUMENTS), expected)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.tie_word_embeddings
    cross = CrossEncoder(str(tmp_path / "model"), device="cpu")
    pairs = [(QUERIES[0], document) for document in DOCUMENTS]
    np.testing.assert_allclose(cross.predict(pairs), expected, atol=1e-5)
    other = one.score(QUERIES[0], DOCUMENTS, instruction=INSTRUCTION)
    np.testing.assert_allclose(cross.predict(pairs, prompt=INSTRUCTION), other, atol=1e-5)


def test_a_released_checkpoint_loads(tmp_path):
    """The layout of Qwen3-Reranker: half precision, the tokenizer of a chat model, nothing of ours."""
    one = reranker()
    half = copy.deepcopy(one.model).to(torch.bfloat16)
    half.save_pretrained(tmp_path)
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = chat_template(INSTRUCTION)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    found = Reranker.from_pretrained(tmp_path)
    assert found.model.dtype == torch.float32
    np.testing.assert_allclose(found.score("q", DOCUMENTS), one.score("q", DOCUMENTS), atol=0.05)


def test_the_chat_template_writes_the_prompt(tmp_path):
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = chat_template("Find it")
    tokenizer.save_pretrained(tmp_path)
    stored = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "query", "content": "a {{ q }}?"}, {"role": "document", "content": "d\n"}]
    render = lambda *first: stored.apply_chat_template([*first, *messages], tokenize=False)  # noqa: E731
    assert render() == text("a {{ q }}?", "d\n", "Find it")
    assert render({"role": "system", "content": "Other"}) == text("a {{ q }}?", "d\n", "Other")


QWEN = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}{%- endif %}"
)


def test_the_prompt_is_what_the_chat_template_of_qwen3_makes_of_it():
    tokenizer = copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = QWEN
    user = f"<Instruct>: {INSTRUCTION}\n<Query>: q?\n<Document>: d"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
    options = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    before, after = around_query(INSTRUCTION)
    between, tail = AROUND_DOCUMENT
    prompt = f"{before}q?{after}{between}d{tail}"
    assert prompt == tokenizer.apply_chat_template(messages, **options) == text("q?", "d")


def test_mixed_precision_is_close():
    one = reranker()
    expected = one.score("q", DOCUMENTS)
    one.mixed_precision = True
    found = one.score("q", DOCUMENTS)
    assert (found != expected).any()
    np.testing.assert_allclose(found, expected, atol=0.02)


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match=r"is_causal is false.*autoregressive"):
        Reranker(tiny.model(head=True), tiny.tokenizer())
    with pytest.raises(ValueError, match=r"max_length must be at least \d+, got 20"):
        reranker(max_length=20)
    with pytest.raises(ValueError, match="got one string"):
        reranker().score("q", "document")
    one = reranker()
    with torch.no_grad():
        one.model.get_input_embeddings().weight[ids(one, "東")[0]] = torch.nan
    with pytest.raises(ValueError, match=r"Document 1 of 2: .*NaN"):
        one.score("q", ["a", "東京"])


def test_answers_that_begin_alike_are_refused():
    """A vocabulary in which "yes" and "no" are unknown."""
    from tokenizers import Tokenizer, models

    with pytest.raises(ValueError, match=r"begin with the same token, '\?'"):
        answers(Tokenizer(models.WordLevel({"?": 0}, unk_token="?")))
