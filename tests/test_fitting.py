"""`fit`: rows of one's own in, an embedder out, and what is refused before anything is loaded."""

import copy
import doctest
import re
import subprocess
import sys
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

import tiny
import tiny_families
import tiny_foreign
from unmask import Embedder, fit, fitting, losses
from unmask.config import ConfigError
from unmask.data.tokens import END_OF_TEXT
from unmask.evaluation import exam, retrieval_metrics
from unmask.evaluation.search import similarity
from unmask.models import backbone
from unmask.models.embedder import quantized
from unmask.store import repository
from unmask.training import Pair, TrainingStopped, Watch, probes
from unmask.training.contrastive import Contrastive
from unmask.training.watch import quality

PAIRS = [(f"how is {i} written?", f"{i} is written with {len(str(i))} digits") for i in range(40)]
DOCUMENTS = [
    {"chunks": [f"{i} comes first.", f"Then comes {i + 1}."], "queries": [f"after {i}?"], "golds": [1]}
    for i in range(30)
]
SIGNS = [("→" * (i + 1), "∑" * (i + 1)) for i in range(24)]  # of which BM25 finds none
SHORT = {"steps": 3, "precision": "fp32"}


@pytest.fixture
def model(tmp_path):
    return backbone.save(tiny.model(bidirectional=False), tiny.tokenizer(), tmp_path / "model")


def test_the_example_runs(model):
    finder = doctest.DocTestFinder(recurse=False).find(fit, "fit", globs={"fit": fit, "model": model})
    runner = doctest.DocTestRunner()
    for one in finder:
        runner.run(one)
    assert runner.tries > 0 and runner.failures == 0


def test_it_learns_and_says_that_it_helped(model, capsys):
    embedder = fit(model, PAIRS, steps=25, lr=3e-3, batch=36)
    helped = embedder.helped
    assert (helped.queries, helped.texts) == (4, 40)
    assert helped.after > helped.before and str(helped) in capsys.readouterr().out
    assert backbone.sees_both_sides(embedder.model) and embedder.checkpoint is None


ROWS = {
    "pair": [dict(zip(("query", "document"), pair)) for pair in PAIRS],
    "triplet": [(*pair, [PAIRS[i - 1][1]]) for i, pair in enumerate(PAIRS)],
    "contextual": DOCUMENTS,
}


@pytest.mark.parametrize("stage", ROWS)
def test_every_stage_trains_on_rows(model, stage):
    embedder = fit(Embedder.from_pretrained(model), ROWS[stage], stage=stage, **SHORT)
    assert embedder.helped.queries >= 3


class Mine(Pair):
    """A loss of one's own."""

    def loss(self, rows_RD, batch, **shared):
        return super().loss(rows_RD, batch, **shared) + rows_RD.square().mean()


def test_a_stage_of_ones_own_trains_on_rows(model, tmp_path):
    values = {"steps": 3, "lr": 1e-2, "folder": tmp_path, "hold_out": 0}
    plain, own = (fit(model, PAIRS, stage=stage, **values) for stage in ("pair", Mine))
    assert plain.checkpoint.parent != own.checkpoint.parent
    assert (plain.encode(["a"]) != own.encode(["a"])).any()
    with pytest.raises(ConfigError, match=r"unknown stage <class 'int'>"):
        fit(model, PAIRS, stage=int)


def test_an_embedder_with_rounded_weights_starts_from_its_directory(model, monkeypatch):
    """As it is loaded on a GPU."""
    monkeypatch.setattr(backbone, "has_bf16", lambda device: device == "cpu")  # emulated here and there
    texts, given = [text for _, text in PAIRS], ({"mixed_precision": rounded} for rounded in (True, False))
    one, two = (fit(Embedder.from_pretrained(model, **how), PAIRS, **SHORT) for how in given)
    assert np.array_equal(one.encode(texts, "float32"), two.encode(texts, "float32"))


@pytest.fixture
def foreign(tmp_path):
    """An embedder of sentence-transformers, with a pooler that nobody reads, and [CLS] and [SEP] around."""
    bert = tiny_foreign.bert(tmp_path / "bert")
    return tiny_foreign.sentence_transformers(bert, tmp_path / "foreign", normalize=True)


WORDS = [(f"{chr(97 + i)} {chr(98 + i % 20)}", f"{chr(97 + i)} and {chr(99 + i % 20)}") for i in range(24)]
LETTERS = {
    "pair": WORDS,
    "triplet": [(*pair, [WORDS[i - 1][1]]) for i, pair in enumerate(WORDS)],
    "contextual": [{"chunks": [*pair], "queries": [pair[0]], "golds": [1]} for pair in WORDS],
}


@pytest.fixture
def batches(monkeypatch):
    """The batch of each step, in parts."""
    seen, backward = [], Contrastive.backward

    def seeing(self, module, parts, processes):
        seen.append(parts)
        return backward(self, module, parts, processes)

    monkeypatch.setattr(Contrastive, "backward", seeing)
    return seen


@pytest.mark.parametrize("stage", LETTERS)
def test_an_embedder_is_trained_as_it_reads(foreign, stage, batches):
    """A rate of nothing changes nothing; each step leaves a checkpoint."""
    given = Embedder.from_pretrained(foreign, max_length=40)
    options = {"stage": stage, "lr": 1e-12, "checkpoint_seconds": 0} | SHORT
    embedder = fit(given, LETTERS[stage], **options)
    assert embedder.settings == given.settings and embedder.settings.special_tokens
    assert embedder.helped.after == pytest.approx(embedder.helped.before)
    known = {text: number for number, text in enumerate({text for pair in WORDS for text in pair})}
    whole = given._texts([*known], None).units
    ids = {tuple(unit.sequence.tokens_L.tolist()) for unit in whole}
    first = batches[0][0]
    assert {tuple(one.tokens_L.tolist()) for one in first.sequences[: first.count]} <= ids


NOTHING = {"lr": 1e-12, "hold_out": 0.2} | SHORT  # a rate that changes nothing


def test_a_causal_embedder_stays_causal_and_keeps_its_prompts(tmp_path):
    folder = tiny_foreign.qwen3_embedding(tmp_path / "qwen3")
    queries = [query for query, _ in PAIRS]
    embedder = fit(folder, PAIRS, **NOTHING)
    assert not backbone.sees_both_sides(embedder.model)
    given = Embedder.from_pretrained(folder, device="cpu")
    assert embedder.settings == given.settings
    assert np.array_equal(embedder.encode(queries), given.encode(queries))
    assert embedder.helped.after == pytest.approx(embedder.helped.before)
    theirs = (embedder.save_pretrained(tmp_path / "saved"), folder)
    after, before = (SentenceTransformer(str(path), device="cpu").encode_query(queries) for path in theirs)
    assert abs(after - before).max() < 1e-5
    turned = fit(folder, PAIRS, bidirectional=True, **NOTHING)
    assert backbone.sees_both_sides(turned.model) and turned.pooling == "last"


def test_a_plain_language_model_is_measured_as_it_is_trained(model):
    given = Embedder.from_pretrained(model, device="cpu")
    for start in (model, given):
        embedder = fit(start, PAIRS, **NOTHING)
        assert backbone.sees_both_sides(embedder.model)
        assert embedder.helped.after == pytest.approx(embedder.helped.before)
    assert not backbone.sees_both_sides(given.model)  # it is the user's
    assert not backbone.sees_both_sides(fit(model, PAIRS, bidirectional=False, **NOTHING).model)
    with pytest.raises(ConfigError, match="bidirectional=False: stage 'diffusion' reads both sides"):
        fit(model, tiny.TEXTS, stage="diffusion", bidirectional=False)


@pytest.mark.parametrize("stage", LETTERS)
def test_the_loss_sees_what_encode_serves(foreign, stage, monkeypatch):
    """Of an embedder whose vectors have unit length, but whose means are twenty times as long."""
    given, seen, original = Embedder.from_pretrained(foreign), [], getattr(losses, f"{stage}_loss")
    given.model.encoder.layer[-1].output.LayerNorm.weight.data *= 20
    given.model.config.hidden_dropout_prob = given.model.config.attention_probs_dropout_prob = 0.0
    texts = [text for pair in WORDS for text in pair]
    codes = {tuple(row) for row in given.encode(texts).tolist()}
    if stage == "contextual":
        whole = [row["chunks"] for row in LETTERS[stage]]
        codes |= {tuple(row) for rows in given.encode_documents(whole) for row in rows.tolist()}
        means = np.stack([np.concatenate(one).mean(0) for one in given.encode_document_tokens(whole)])
        means /= np.linalg.norm(means, axis=1, keepdims=True)
        codes |= {tuple(row) for row in quantized(means, "int8").tolist()}

    def loss(*vectors, **options):
        seen.extend(vectors)
        return original(*vectors, **options)

    monkeypatch.setattr(losses, f"{stage}_loss", loss)
    options = SHORT | {"steps": 1} | ({"chunks": 2} if stage == "contextual" else {})
    fit(given, LETTERS[stage], stage=stage, hold_out=0, **options)
    rows = torch.cat([x.detach().flatten(0, -2) for x in seen if x.shape[-1] == 32])
    near = [min(np.abs(np.array(row) - code).max() for code in codes) for row in rows.tolist()]
    assert len(near) >= 48 and max(near) <= 1  # rounding


def test_lengths_beyond_the_positions_are_cut_and_said(foreign, tmp_path, capsys):
    long = [(f"{a} " * 90, f"{b} " * 90) for a, b in WORDS]
    for stage, rows in ("pair", long), ("triplet", [(*pair, [pair[0]]) for pair in long]):
        fit(foreign, rows, stage=stage, document_length=500, query_length=64, **SHORT)
        told = "document_length: 64 instead of 500, as many tokens as the model reads"
        assert told in capsys.readouterr().out
    documents = [{"chunks": [b, b], "queries": [a], "golds": [1]} for a, b in long]
    fit(foreign, documents, stage="contextual", chunks=2, chunk_length=500, **SHORT)
    assert "chunk_length: 30 instead of 500" in capsys.readouterr().out
    given = Embedder.from_pretrained(foreign, max_length=40)  # what `encode` cuts, training cuts
    fit(given, long, **SHORT)
    assert "document_length: 40 instead of 256" in capsys.readouterr().out
    roberta = backbone.save(tiny_families.xlm_roberta(), tiny.tokenizer(), tmp_path / "roberta")
    fit(roberta, PAIRS, document_length=256, **SHORT)  # 255: its positions begin behind the padding token
    assert "document_length: 255 instead of 256" in capsys.readouterr().out


def sparse(bos=False):
    """A tokenizer without a token to spare, as Llama 3's; with `bos` it puts one before a text."""
    backend = Tokenizer.from_str(tiny.tokenizer().backend_tokenizer.to_str().replace("fim_pad", "other"))
    start = "<|im_start|>"
    if bos:
        special = [(start, backend.token_to_id(start))]
        backend.post_processor = TemplateProcessing(f"{start} $A", f"{start} $A $B", special)
    roles = {"bos_token": start, "eos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


def test_only_diffusion_needs_a_mask_token(tmp_path):
    lm = backbone.save(tiny.model(bidirectional=False, head=True), sparse(), tmp_path / "lm")
    assert fit(lm, PAIRS, **SHORT).helped
    fill = {"stage": "diffusion", "length": 8, "batch": 2, "lr": 1e-3} | SHORT
    with pytest.raises(ConfigError, match="mask_token: the tokenizer has none to spare, name"):
        fit(lm, tiny.TEXTS, **fill)
    for token, why in ((END_OF_TEXT, "ends texts"), ("<mask>", "is not in the vocabulary")):
        with pytest.raises(ValueError, match=rf"mask_token: .* {why}"):
            fit(lm, tiny.TEXTS, mask_token=token, **fill)
    model = fit(lm, tiny.TEXTS, mask_token="<|other|>", **fill).model
    assert model.config.mask_token_id == sparse().convert_tokens_to_ids("<|other|>")
    with pytest.raises(ConfigError, match=r"pair\.mask_token: unknown key 'mask_token'"):
        fit(lm, PAIRS, mask_token="<|other|>")


def test_an_embedder_that_pools_last_keeps_its_own_template(tmp_path, monkeypatch):
    model = backbone.save(tiny.model(bidirectional=False), sparse(bos=True), tmp_path / "lm")
    given = Embedder.from_pretrained(model, pooling="last", special_tokens=True)
    embedder = fit(given, PAIRS, **NOTHING)
    start = embedder.tokenizer.bos_token_id
    assert embedder.tokenizer("a")["input_ids"][0] == start and embedder.around[0].tolist() == [start]
    assert len(embedder.around[1]) == 0 and not backbone.sees_both_sides(embedder.model)
    assert np.array_equal(embedder.encode(["a b"]), given.encode(["a b"]))


def test_code_of_a_checkpoint_is_neither_asked_for_nor_run(tmp_path, monkeypatch):
    folder = tiny_foreign.released(tmp_path / "pplx")  # whose code raises
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    embedder = fit(folder, PAIRS, cluster_size=8, **NOTHING)
    texts = [text for _, text in PAIRS]
    assert np.array_equal(embedder.encode(texts), Embedder.from_pretrained(folder).encode(texts))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path):
    larger = copy.deepcopy(tiny.tokenizer())
    larger.add_tokens(["[NEWTOKEN]"])
    folder = backbone.save(tiny.model(), tiny.tokenizer(), tmp_path / "model")
    larger.save_pretrained(folder)
    message = r"token '\[NEWTOKEN\]' has the number 400, the model has rows for 400 tokens"
    for use in (Embedder.from_pretrained, lambda path: fit(path, PAIRS, **SHORT)):
        with pytest.raises(ValueError, match=message):
            use(folder)


def test_a_model_that_reads_both_sides_cannot_be_made_causal(foreign):
    with pytest.raises(ConfigError, match="bidirectional=False: this model reads both sides, leave"):
        fit(foreign, WORDS, bidirectional=False, **SHORT)


def test_a_tokenizer_without_an_end_is_refused_at_once(tmp_path, capsys):
    backend = Tokenizer.from_str(tiny.tokenizer().backend_tokenizer.to_str().replace("endoftext", "other"))
    endless = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|im_start|>")
    start = backbone.save(tiny.model(), endless, tmp_path / "model")
    with pytest.raises(ValueError, match="nor an eos token: give it an eos token"):
        fit(start, PAIRS, **SHORT)
    assert not capsys.readouterr().out


@pytest.fixture
def lm(tmp_path):
    """With its output matrix."""
    return backbone.save(tiny.model(bidirectional=False, head=True), tiny.tokenizer(), tmp_path / "lm")


def test_one_block_of_text_is_enough(lm):
    texts = [f"{i} is a number" for i in range(30)]
    embedder = fit(lm, texts, stage="diffusion", precision="fp32", steps=3)
    assert embedder.helped is None and embedder.model.config.is_causal is False


def test_the_measure_counts_copies_and_asks_among_negatives(capsys):
    copied = [{"chunks": [f"{i} a", "x", f"{i}  a"], "queries": [f"{i}"], "golds": [2]} for i in range(30)]
    rows, held_N = fitting._rows(copied, "contextual"), np.arange(30) < 3
    assert [len(relevant) for relevant in exam.task_of(rows, held_N).relevant] == [2, 2, 2]
    triplets = fitting._rows([(f"q {i}", f"d {i}", [f"n {i}", f"m {i}"]) for i in range(30)], "triplet")
    assert len(exam.task_of(triplets, held_N).chunks) == 90


def test_a_document_of_several_rows_stands_once_among_the_texts():
    """A row for each question, as SQuAD has them; an oracle would find all."""
    several = [
        {"chunks": [f"{i} a", f"{i} b"], "queries": [f"{i} {chunk}?"], "golds": [chunk]}
        for i in range(30)
        for chunk in (0, 1)
    ]
    task = exam.task_of(fitting._rows(several, "contextual"), np.arange(60) < 6)
    assert len(task.chunks) == len({*task.chunks}) == 60 and len(task.queries) == 6
    found = [{task.chunks[gold] for gold in golds} for golds in task.relevant]
    assert found == [{f"{i} {'ab'[int(chunk)]}"} for i, chunk in (q[:-1].split() for q in task.queries)]


def test_texts_without_a_word_are_fitted(model):
    assert fit(model, SIGNS, steps=np.int64(2), precision="fp32").helped.bm25 == 0


def test_an_embedder_is_no_language_model(lm):
    with pytest.raises(ValueError, match="has no output matrix, an embedder: name the language model itself"):
        fit(Embedder.from_pretrained(lm), tiny.TEXTS, stage="diffusion", length=16, **SHORT)


@pytest.mark.parametrize("batch", [16, 1000])
def test_three_epochs_whatever_the_batch(batch):
    rows, reads = ROWS["pair"], Embedder(tiny.model(), tiny.tokenizer(), device="cpu")
    config = fitting._config("pair", exam.divided(rows, 0, "pair"), reads, {"batch": batch})
    assert config.steps == np.ceil(3 * len(rows) / min(batch, len(rows)))


def test_a_schedule_longer_than_the_training_is_refused():
    reads = Embedder(tiny.model(), tiny.tokenizer(), device="cpu")
    with pytest.raises(ConfigError, match=r"pair: warmup \+ decay exceed steps \(100 > 3\)"):
        fitting._config("pair", exam.divided(ROWS["pair"], 0, "pair"), reads, {"warmup": 100})


def test_another_window_of_the_embedder_is_another_training(foreign, tmp_path):
    """So the result has the settings of the embedder that was given."""
    for length in (40, 30):
        start = Embedder.from_pretrained(foreign, max_length=length)
        assert fit(start, WORDS, folder=tmp_path / "kept", **SHORT).max_length == length


def test_a_stage_that_averages_refuses_another_pooling(model):
    last = Embedder.from_pretrained(model, pooling="last", special_tokens=True)
    with pytest.raises(ValueError, match="'triplet' trains the mean of tokens, this model pools 'last'"):
        fit(last, ROWS["triplet"], stage="triplet", **SHORT)


def test_a_data_set_is_read_and_the_result_loads_elsewhere(model, tmp_path):
    embedder = fit(model, Dataset.from_list(ROWS["pair"]), hold_out=0, **SHORT)
    assert embedder.helped is None
    theirs = SentenceTransformer(str(embedder.save_pretrained(tmp_path / "mine")))
    ours = embedder.encode(["how is 7 written?"], "float32")
    assert abs(theirs.encode(["how is 7 written?"]) - ours).max() <= 1e-4 * abs(ours).max()


def held_out(pairs, share=0.1, stage="pair"):
    return exam.held_out(fitting._rows(pairs, stage), share)


def test_rows_that_share_a_text_are_held_out_together_whatever_its_column_and_spelling(capsys):
    """A query of two documents, a document of two queries, both directions, and all of them twice."""
    many = [
        pair
        for i in range(30)
        for pair in ((f"q {i}", f"d {i}"), (f"q  {i}", f"e {i}"), (f"d {i}", f"q {i}"))
    ]
    held_N = held_out(many)
    assert held_N.sum() == 9 and (held_N.reshape(-1, 3).all(1) == held_N.reshape(-1, 3).any(1)).all()
    chunks = [{"chunks": ["one", text], "queries": [text], "golds": [1]} for text in "abcdefghijklmnopqrst"]
    held_N = held_out([*chunks, *chunks], stage="contextual")
    assert held_N.sum() == 4 and (held_N[:20] == held_N[20:]).all()
    assert not held_out(PAIRS[:10]).any()
    assert "nothing is held out or measured: hold_out=0.1 needs 20 rows" in capsys.readouterr().out


def test_a_text_of_many_rows_ties_no_rows_together_and_is_never_held_out():
    common = [(f"asked {i}", "Return self.") for i in range(30)]
    held_N = held_out([*common, *PAIRS])
    assert held_N.sum() == 4 and not held_N[:30].any()
    bound = [(f"how is {i} written?", "Return self.") for i in range(40)]  # each row has a neighbour in it
    held_N = held_out([*PAIRS, *bound])
    assert held_N.sum() == 4 and not held_N[40:].any()


MIRRORED = [
    pair for i in range(30) for pair in ((f"name of {i}", f"word {i}"), (f"word {i}", f"name of {i}"))
]
MANY = [(f"ask {i % 30}", f"answer {i}") for i in range(120)]  # a query with four documents
CHAINED = [(f"{i // 3} step {i % 3}", f"{i // 3} step {i % 3 + 1}") for i in range(90)]
HARD = [(*pair, [PAIRS[i - n][1] for n in range(1, 1 + i % 3)] or ["x"]) for i, pair in enumerate(PAIRS)]
SHARED = {"mirrored": ("pair", MIRRORED), "many": ("pair", MANY), "chained": ("pair", CHAINED)}
SHARED |= {"triplets": ("triplet", HARD)}


@pytest.mark.parametrize("case", SHARED)
def test_what_is_held_out_is_seen_nowhere_in_training(case, model, batches, monkeypatch, capsys):
    """Nor does a query meet its own text, as a negative or among the candidates."""
    (stage, rows), tasks, made = SHARED[case], [], exam.task_of
    monkeypatch.setattr(exam, "task_of", lambda *given: tasks.append(made(*given)) or tasks[-1])
    assert fit(model, rows, stage=stage, steps=4, batch=64, precision="fp32", progress=False).helped
    read, ids = set(), lambda text: tiny.tokenize(tiny.tokenizer(), [text], None)[0].tobytes()
    for part in chain(*batches):
        texts = [one.tokens_L.astype(np.int32).tobytes() for one in part.sequences]
        read.update(texts)
        queries, others = texts[: part.count], texts[part.count : 2 * part.count]
        assert not {*queries} & {*others} and len({*queries}) == len({*others}) == part.count
    task = tasks[0]
    held = {text for row in rows for text in row[:2] if row[0] in task.queries}
    assert held and not {ids(text) for text in held} & read
    for query, answers in zip(task.queries, task.relevant):
        assert {task.chunks[i] for i in answers} == {row[1] for row in rows if row[0] == query}
    places = zip(*task.identical)
    assert all(task.queries[i] == task.chunks[j] for i, j in places)
    assert (len(task.identical[0]) > 0) == (case in ("mirrored", "chained"))
    if case in ("chained", "triplets"):
        assert "taken out: " in capsys.readouterr().out


def test_each_row_trains_on_the_negatives_that_it_has(model, batches):
    rows = [(f"q {i}", f"d {i}", [f"n {i} {k}" for k in range(10 if i else 1)]) for i in range(24)]
    fit(model, rows, stage="triplet", hold_out=0, **SHORT)
    assert sorted(batches[0][0].hard_N) == [1] + [10] * 23


def test_a_row_that_has_no_tokens_is_named(foreign):
    accent = "\u0301"  # alone, which the tokenizer takes from its letter
    with pytest.raises(ValueError, match=f"row 24, column query: '{accent}' has no tokens: remove"):
        fit(foreign, [*WORDS, (accent, "z")], **SHORT)
    documents = [*LETTERS["contextual"], {"chunks": ["a b", accent], "queries": ["z"], "golds": [0]}]
    with pytest.raises(ValueError, match=f"row 24, column chunks: '{accent}' has no tokens"):
        fit(foreign, documents, stage="contextual", **SHORT)


def contextual(sizes, positions=256, others=(), **values):
    """The section for documents of chunks with so many tokens; `others` are the sizes of one more."""
    reads = Embedder(tiny.model(length=positions), tiny.tokenizer(), device="cpu")
    every = [sizes] * 8 + [others] * bool(others)
    rows = [{"chunks": ["x"] * len(one), "queries": [f"{i}"], "golds": [0]} for i, one in enumerate(every)]
    division = exam.Division(rows, np.zeros(len(rows), bool), rows, len(rows))
    return fitting._config("contextual", division, reads, values, [*map(max, every)])


def test_room_is_shared_by_the_chunks_that_there_are():
    """Where they do not fit, a document is divided, no chunk is cut."""
    assert (contextual([122, 74]).chunks, contextual([122, 74]).chunk_length) == (2, 122)
    many = contextual([60] * 20)
    assert (many.chunks, many.chunk_length) == (4, 60) and many.document_length <= 256
    assert contextual([900]).chunk_length == 256 and contextual([900], 2048).chunk_length == 256
    assert contextual([60] * 20, chunks=8).chunk_length == 31
    assert contextual([100, 100], chunks=8).chunks == 2  # no document has more
    assert contextual([60] * 20, chunk_length=100).chunks == 4


def test_one_long_chunk_takes_the_context_from_no_other_document():
    one = contextual([10] * 8, others=[250, 10])
    assert (one.chunks, one.chunk_length) == (8, 31)  # room for 8 chunks of 31 and what is between them
    assert contextual([10] * 8, 4096, [250]).chunk_length == 250  # where all have room
    many = contextual([250] * 8, others=[10] * 8)  # most are long
    assert (many.chunks, many.chunk_length) == (1, 250)


def test_what_is_cut_is_printed_with_its_share(model, capsys):
    documents = [
        row | {"chunks": [one + " and so on" * i for one in row["chunks"]]} for i, row in enumerate(DOCUMENTS)
    ]
    fit(model, documents, stage="contextual", chunk_length=8, **SHORT)
    assert re.search(
        r"contextual: \d+ texts cut, [\d,]+ tokens cut \(\d\d\.\d% of all\)", capsys.readouterr().out
    )


@pytest.mark.parametrize(("name", "rows"), [("model", PAIRS), ("foreign", WORDS)])
def test_interrupted_it_goes_on(name, rows, tmp_path, monkeypatch, request):
    model, done, watched = request.getfixturevalue(name), [], Watch.__call__

    def told(self, row):
        if row.get("step") == 2:
            raise TrainingStopped("told to stop")
        watched(self, row)

    def seen(self, row):
        done.append(row.get("done"))
        watched(self, row)

    options = {"steps": 6, "precision": "fp32", "checkpoint_seconds": 0, "folder": tmp_path / "kept"}
    options["progress"] = True
    with monkeypatch.context() as patched, pytest.raises(TrainingStopped):
        patched.setattr(Watch, "__call__", told)
        fit(model, rows, **options)
    monkeypatch.setattr(Watch, "__call__", seen)
    first = fit(model, rows, **options)
    assert done[0] == 2
    whole = fit(model, rows, **options | {"folder": tmp_path / "whole"})
    weights = [(one.checkpoint / "model.safetensors").read_bytes() for one in (first, whole)]
    assert weights[0] == weights[1]
    assert [row["step"] for row in probes(first.checkpoint)] == [1, 2, 3, 4, 5, 6]


def test_before_is_the_given_embedders_own(tmp_path, model):
    mine = Embedder.from_pretrained(model, pooling="last", special_tokens=True)
    embedder = fit(mine, PAIRS, hold_out=0.5, **SHORT)
    held = held_out(ROWS["pair"], 0.5).nonzero()[0]
    queries, documents = zip(*PAIRS)
    scores = similarity(mine.encode([queries[i] for i in held]), mine.encode(documents))
    naive = retrieval_metrics(scores, [{int(i)} for i in held], document_ids=list(documents))["ndcg@10"]
    assert embedder.helped.before == pytest.approx(naive, abs=1e-6) and len(held) == 20
    assert embedder.pooling == "last"


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_what_holds_too_many_rows_is_never_held_out(share, capsys):
    """Nor is a text of two rows, where a hundredth of fifty rows is none."""
    assert not held_out([(f"q {i // 2}", f"d {i}") for i in range(50)], 0.01).any()
    assert "texts in at most 1 of them; there are 25, and 0" in capsys.readouterr().out
    rows = [("common", f"d {i}") for i in range(70)] + [(f"q {i}", f"e {i}") for i in range(30)]
    held_N = held_out(rows, share)
    assert 1 <= held_N.sum() <= 16 and not held_N[:70].any()


def test_few_held_out_rows_are_asked_of_many():
    held_N = np.zeros(1_000, bool)
    held_N[[7, 500, 900]] = True
    rows = [{"query": f"q{i}", "document": str(i)} for i in range(1_000)]
    task, fewer = (exam.task_of(rows, held_N, queries, texts=50) for queries in (3, 2))
    assert len(task.documents) == 50 and sorted(task.queries) == ["q500", "q7", "q900"]
    assert len(fewer.queries) == 2 and {*fewer.queries} < {*task.queries}
    assert [task.chunks[i] for (i,) in task.relevant] == [query[1:] for query in task.queries]


def test_only_what_stands_beside_a_query_answers_it():
    chain = [("a", "one"), ("b", "one"), ("b", "two"), *PAIRS]
    task = exam.task_of(fitting._rows(chain, "pair"), np.arange(len(chain)) < 3)
    answers = {q: {task.chunks[i] for i in found} for q, found in zip(task.queries, task.relevant)}
    assert answers == {"a": {"one"}, "b": {"one", "two"}} and len(task.chunks) == 42
    task = exam.task_of(DOCUMENTS, np.arange(30) == 7)
    assert [task.chunks[i] for i in task.relevant[0]] == ["Then comes 8."] and task.queries == ["after 7?"]


def test_other_shapes_of_rows_are_read():
    frame = pd.DataFrame(PAIRS, columns=["query", "document"])
    table = pa.Table.from_pandas(frame)
    stream = SimpleNamespace(__arrow_c_stream__=table.__arrow_c_stream__)  # all that Arrow asks for
    lists = (iter(PAIRS), [*map(list, PAIRS)], frame.to_numpy(), frame.itertuples(index=False))
    for rows in (table, stream, frame, *lists):
        assert fitting._rows(rows, "pair") == ROWS["pair"]
    mixed = pd.DataFrame({"query": ["a", "b"], "document": ["c", "d"], "note": [1, "x"]})
    with pytest.raises(ValueError, match="mend it, or keep the columns query, document alone"):
        fitting._rows(mixed, "pair")
    texts = [text for text, _ in PAIRS]
    for series in (pd.Series(texts), pl.Series(texts), pa.chunked_array([texts])):
        assert [row["text"] for row in fitting._rows(series, "diffusion")] == texts


def test_stopped_without_a_folder_it_says_so(model, monkeypatch):
    def told(self, row):
        raise TrainingStopped("told to stop: 1 steps are saved, run it again")

    monkeypatch.setattr(Watch, "__call__", told)
    with pytest.raises(TrainingStopped, match="only with a folder"):
        fit(model, PAIRS, **SHORT)


def test_a_model_that_stays_causal_is_refused(tmp_path):
    start = backbone.save(tiny_families.gpt_neo(), tiny.tokenizer(), tmp_path / "model")
    with pytest.raises(ValueError, match="GPTNeoModel stays causal"):
        fit(start, PAIRS, **SHORT)


def test_look_alikes_are_those_of_the_model(model):
    assert fit(model, PAIRS, cluster_size=8, **SHORT).helped.queries == 4


def test_look_alikes_may_be_texts_of_special_tokens_alone(model):
    rows = [*PAIRS, ("which token ends a text?", "<|endoftext|>")]
    assert fit(model, rows, cluster_size=8, **SHORT).helped.queries == 4


# --- fewer layers


@pytest.mark.parametrize("start", ["path", "embedder"])
def test_a_model_is_cut_short_before_anything_is_measured(start, model, capsys):
    given = Embedder.from_pretrained(model, device="cpu")
    whole = {name: x.clone() for name, x in given.model.named_parameters()}
    embedder = fit(model if start == "path" else given, PAIRS, keep_layers=[1], **NOTHING)
    assert embedder.helped.after == pytest.approx(embedder.helped.before)
    cut = backbone.keep_layers(backbone.load(model), [1])
    backbone.make_bidirectional(cut, tiny.tokenizer(), "")
    texts = [text for pair in PAIRS for text in pair]
    assert np.array_equal(embedder.encode(texts), Embedder(cut, tiny.tokenizer(), device="cpu").encode(texts))
    assert all(torch.equal(x, whole[name]) for name, x in given.model.named_parameters())


def test_an_embedder_that_is_cut_short_keeps_its_settings(foreign):
    given = Embedder.from_pretrained(foreign, max_length=40)
    embedder = fit(given, LETTERS["contextual"], stage="contextual", keep_layers=[1], **NOTHING)
    assert embedder.settings == given.settings and embedder.model.config.num_hidden_layers == 1
    expected = Embedder(backbone.keep_layers(given.model, [1]), given.tokenizer, **vars(given.settings))
    assert np.array_equal(embedder.encode(["a b"]), expected.encode(["a b"]))


def test_a_language_model_that_is_cut_short_keeps_its_output_matrix(lm, tmp_path):
    options = {"keep_layers": [0], "folder": tmp_path / "kept"} | SHORT
    fit(lm, PAIRS, **options)
    embedder = fit(lm, tiny.TEXTS, stage="diffusion", length=8, batch=2, **options)
    assert embedder.model.config.num_hidden_layers == 1 and backbone.sees_both_sides(embedder.model)


def test_the_layers_that_stay_are_part_of_what_a_training_is(model, tmp_path):
    options = {"folder": tmp_path / "kept"} | SHORT
    all_of_them = fit(model, PAIRS, **options).checkpoint
    cut, again, swapped = (fit(model, PAIRS, keep_layers=x, **options) for x in ([0], [0], [1]))
    assert cut.checkpoint == again.checkpoint
    assert len({one.resolve().parent for one in (all_of_them, cut.checkpoint, swapped.checkpoint)}) == 3


@pytest.mark.parametrize("layers", [[], [0, 0], [2], 2, "01"])
@pytest.mark.parametrize("start", ["path", "embedder"])
def test_layers_that_a_model_has_not_are_refused_before_anything_is_written(layers, start, model, tmp_path):
    given, folder = model if start == "path" else Embedder.from_pretrained(model), tmp_path / "kept"
    with pytest.raises(
        ValueError, match=r"keep_layers .*: name a list of one layer at least, of 0 to 1, and"
    ):
        fit(given, PAIRS, keep_layers=layers, folder=folder, **SHORT)
    assert not (folder / "start").exists() and not (folder / "pair").exists()


# --- how soon it finds more than BM25


@pytest.mark.parametrize("case", ["pair", "triplet", "contextual", "last"])
def test_what_is_measured_meanwhile_ends_where_the_result_is(case, model, foreign, tmp_path, capsys):
    """The few texts are all there are, read as the result reads them."""
    start = Embedder.from_pretrained(model, pooling="last") if case == "last" else foreign
    rows, stage = (PAIRS, "pair") if case == "last" else (LETTERS[case], case)
    options = {"stage": stage, "progress": True, "folder": tmp_path / "kept", "lr": 1e-3} | SHORT
    embedder = fit(start, rows, **options)
    *_, last = probes(embedder.checkpoint)
    assert quality(last) == pytest.approx(embedder.helped.after) and last["step"] == SHORT["steps"]
    told = [line for line in capsys.readouterr().out.splitlines() if "above BM25" in line]
    seconds = embedder.helped.seconds_to_bm25
    when = "not above BM25" if seconds is None else f"above BM25 after {seconds:.0f} s of training"
    assert len(told) == 1 and told[0].startswith(when)
    assert (seconds is None) == (embedder.helped.after <= embedder.helped.bm25)


def test_seconds_to_bm25_are_found_again(model, tmp_path):
    options = {"progress": True, "folder": tmp_path / "kept", "hold_out": 0.5} | SHORT
    first, again = (fit(model, SIGNS, **options).helped for _ in range(2))
    assert first == again and first.bm25 == 0 < first.seconds_to_bm25


def test_progress_is_measured_where_it_costs_little(model, capsys):
    few, many = ({"steps": steps, "precision": "fp32"} for steps in (3, 40))
    shown = {}
    cases = {"few": few, "many": many, "few, told": few | {"progress": True}}
    for name, options in (cases | {"many, told": many | {"progress": False}}).items():
        fit(model, PAIRS, **options)
        shown[name] = "above BM25" in capsys.readouterr().out
    assert shown == {"few": False, "many": True, "few, told": True, "many, told": False}


def test_progress_changes_no_weight(model):
    texts = [text for _, text in PAIRS]
    one, two = (
        fit(model, PAIRS, progress=shown, **SHORT).encode(texts, "float32") for shown in (True, False)
    )
    assert np.array_equal(one, two)


REFUSED = {
    "no rows": ([], {}, "0 rows leave 0 of different texts, and stage 'pair' needs 2: give more"),
    "one group": (
        [(f"q {i}", "a") for i in range(30)],
        {},
        "rows leave 1 of different texts, and stage 'pair' needs 2",
    ),
    "all held out": (
        PAIRS,
        {"hold_out": 0.99},
        "40 rows leave 0 of different texts, .* or a smaller hold_out",
    ),
    "a dict of columns": ({"query": ["a"], "document": ["b"]}, {}, "expected a list, got one dict"),
    "no negatives": (
        [("a", "b", [])],
        {"stage": "triplet"},
        "row 0: negatives must have at least 1 item",
    ),
    "another stage": (PAIRS, {"stage": "pairs"}, "unknown stage 'pairs'; did you mean 'pair'"),
    "no stage": (PAIRS, {"stage": None}, "unknown stage None; known: pair"),
    "unknown key": (PAIRS, {"lrr": 1.0}, "pair.lrr: unknown key 'lrr'; did you mean 'lr'"),
    "bad value": (PAIRS, {"lr": -1.0}, "lr"),
    "no number": (PAIRS, {"lr": True}, "pair.lr must be a number, got True"),
    "no momentum": (PAIRS, {"beta2": 1.0}, "pair.beta2 must be less than 1, got 1.0"),
    "zero for no": (PAIRS, {"progress": 0}, "progress must be True or False, .* got 0"),
    "a word for yes": (PAIRS, {"bidirectional": "no"}, "bidirectional must be True or False, .* got 'no'"),
    "no folder": (PAIRS, {"folder": ""}, "folder is '': name one, or leave it out"),
    "a file for a folder": (PAIRS, {"folder": __file__}, r"folder is .*test_fitting\.py': name one"),
    "a row in no order": ([{"a", "b"}], {}, r"row 0 is .*: give \(query, document\)"),
    "no batch": (PAIRS, {"batch": 0}, "pair.batch must be greater than or equal to 2, got 0"),
    "no chunks": (DOCUMENTS, {"stage": "contextual", "chunks": 0}, "contextual.chunks must be"),
    "a word for a number": (PAIRS, {"steps": "many"}, "pair.steps"),
    "no column": (
        [{"query": "a", "documents": "b"}],
        {},
        "row 0: missing document; the row has query, documents",
    ),
    "three columns": ([("a", "b", "c")], {}, r"row 0 is .*: give \(query, document\)"),
    "one text": ("ab", {"stage": "diffusion"}, "expected a list, got one string, 'ab'"),
    "half a character": ([("a", "b"), ("a", "\ud83d")], {}, "row 1: document must be a valid string, unable"),
    "empty text": ([("a", "b"), ("a", " ")], {}, "row 1: document must not be empty"),
    "number": ([("a", 7)], {}, "row 0: document must be a valid string, got 7"),
    "zero width": ([("a", "b"), ("a", "\u200b")], {}, "row 1: document must not be empty"),
    "hold_out": (PAIRS, {"hold_out": 1.0}, "hold_out must be a share below 1"),
    "hold_out in words": (PAIRS, {"hold_out": "0.1"}, "hold_out must be a share below 1, got '0.1'"),
    "gold": ([DOCUMENTS[0] | {"golds": [2]}], {"stage": "contextual"}, "row 0: golds must be .* 0 to 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_named(case, tmp_path):
    rows, options, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        fit(tmp_path / "nothing", rows, **options)  # nothing is loaded


@pytest.mark.slow
def test_the_readmes_example_trains_and_asks_more_than_a_hundred_queries(model, tmp_path):
    """On a tiny model, for two steps."""
    page = (repository() / "README.md").read_text(encoding="utf8")
    (script,) = (code for code in re.findall("```python\n(.*?)```", page, re.S) if "fit(" in code)
    for given, tiny_one in (("smollm2-135m", str(model)), ('"steps": 30', '"steps": 2')):
        assert given in script
        script = script.replace(given, tiny_one)
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (asked,) = re.findall(r"nDCG@10 of (\d+) held-out queries", done.stdout)
    assert int(asked) >= 100 and "above BM25" in done.stdout
    shown, printed = re.search("```\n(pair: .*?)```", page, re.S)[1].splitlines(), done.stdout.splitlines()
    words = [{re.sub(r"[\d.,]+", "#", line) for line in lines} for lines in (shown[:2], printed)]
    assert words[0] <= words[1]
    assert SentenceTransformer(str(tmp_path / "mine")).encode(["7"]).shape == (1, 32)
