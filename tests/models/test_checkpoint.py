"""Embedders to and from sentence-transformers, transformers and the released checkpoints."""

import json
import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from test_embedder import DOCUMENTS, TEXTS, WORDS, naive
from tokenizers import Tokenizer
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3Model

import tiny
import tiny_families
import tiny_foreign
from closeness import assert_close
from unmask import Embedder
from unmask.data.tokenize import Table, token_pairs
from unmask.data.tokens import END_OF_TEXT, PlainTokenizer, Truncation, ending
from unmask.models import backbone
from unmask.models.checkpoint import load
from unmask.models.embedder import INSTRUCTIONS, instructed, prompt

LONG = " ".join(WORDS * 12)  # more tokens than there are positions


def loaded(path):
    """By sentence-transformers, and as an embedder."""
    return SentenceTransformer(str(path), device="cpu"), Embedder.from_pretrained(path, device="cpu")


@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("make", [tiny_foreign.bert, tiny_foreign.causal_qwen3])
def test_a_sentence_transformers_model_gives_the_same_vectors(tmp_path, make, normalize, pooling):
    source = make(tmp_path / "a")
    path = tiny_foreign.sentence_transformers(source, tmp_path / "b", pooling, normalize=normalize)
    theirs, embedder = loaded(path)
    expected = theirs.encode([*TEXTS, LONG])
    assert_close(embedder.encode([*TEXTS, LONG], "float32"), expected)
    assert (embedder.special_tokens, embedder.normalize) == (True, normalize)
    if pooling == "mean":
        alone = embedder.encode_documents([[text] for text in TEXTS[:3]], "float32")
        assert_close(np.concatenate(alone), expected[:3])


def test_a_released_qwen3_embedding_gives_the_same_vectors(tmp_path):
    theirs, embedder = loaded(tiny_foreign.qwen3_embedding(tmp_path / "a"))
    assert_close(embedder.encode(TEXTS, "float32"), theirs.encode(TEXTS))
    queries = embedder.encode([instructed(tiny_foreign.INSTRUCTION, text) for text in TEXTS], "float32")
    assert_close(queries, theirs.encode(TEXTS, prompt_name="query"))
    shutil.rmtree(tmp_path / "a")  # it is read once
    saved, again = loaded(embedder.save_pretrained(tmp_path / "saved"))
    assert_close(queries, saved.encode_query(TEXTS))
    assert again.settings == embedder.settings and again.about == {"stage": "sentence-transformers"}


def test_lengths_and_padding_in_a_models_own_files(tmp_path):
    path = tiny_foreign.sentence_transformers(tiny_foreign.bert(tmp_path / "a"), tmp_path / "b")
    tiny_foreign.edit(path / "sentence_bert_config.json", max_seq_length=10)
    cut = {"max_length": 6, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    pad = {"strategy": {"Fixed": 6}, "direction": "Right", "pad_id": 0, "pad_type_id": 0}
    pad |= {"pad_token": "[PAD]", "pad_to_multiple_of": None}
    tiny_foreign.edit(path / "tokenizer.json", truncation=cut, padding=pad)
    (path / "sentence_bert_config.json").rename(path / "sentence_roberta_config.json")  # as older ones
    theirs, embedder = loaded(path)
    assert embedder.max_length == theirs.max_seq_length == 10
    assert_close(embedder.encode(TEXTS, "float32"), theirs.encode(TEXTS))


BERT, PLAIN, POOLING = (
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)
POOLER = {"text": {"method": "forward", "method_output_name": "pooler_output"}}
CHANGE_VECTORS = [  # or their order
    (PLAIN, {"default_prompt_name": "query", "prompts": {"query": "ask: "}}),
    (PLAIN, {"truncate_dim": 16}),
    (PLAIN, {"similarity_fn_name": "dot"}),
    (PLAIN, {"model_type": "SparseEncoder"}),
    (BERT, {"do_lower_case": True}),
    (BERT, {"modality_config": POOLER}),
    (BERT, {"config_args": {"num_hidden_layers": 1}}),
    (BERT, {"tokenizer_args": {"model_max_length": 5}}),
    (BERT, {"transformer_task": "fill-mask"}),
    (BERT, {"of_a_later_version": 1}),
    (POOLING, {"include_prompt": False}),
    (POOLING, {"pooling_mode": "cls"}),
    (POOLING, {"pooling_mode": ["mean", "cls"]}),
    ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}),
    ("tokenizer_config.json", {"truncation_side": "left"}),
    ("config.json", {"quantization_config": {"quant_method": "fp8"}}),
    ("config.json", {"auto_map": {"AutoModel": "modeling.Bidirectional"}}),
]


@pytest.mark.parametrize(("file", "change"), CHANGE_VECTORS)
def test_a_setting_that_changes_vectors_is_refused_by_name(tmp_path, file, change):
    path = tiny_foreign.sentence_transformers(
        tiny_foreign.bert(tmp_path / "a"), tmp_path / "b", normalize=True
    )
    tiny_foreign.edit(path / file, **change)
    with pytest.raises(ValueError, match=next(iter(change))):
        load(path)


def test_what_adds_to_a_model_is_refused(tmp_path):
    path = tiny_foreign.sentence_transformers(tiny_foreign.bert(tmp_path / "a"), tmp_path / "b")
    listed = json.loads((path / "modules.json").read_text())
    for kind in ("sentence_transformers.models.Dense", "their_code.Normalize"):
        more = {"idx": 2, "name": "2", "path": "2_More", "type": kind}
        (path / "modules.json").write_text(json.dumps([*listed, more]))
        with pytest.raises(ValueError, match=f"modules .*{kind} are not supported"):
            load(path)
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="has adapter_config"):
        load(path)


def test_settings_that_change_nothing_are_read(tmp_path):
    path = tiny_foreign.sentence_transformers(tiny_foreign.bert(tmp_path / "a"), tmp_path / "b")
    tiny_foreign.edit(
        path / PLAIN, default_prompt_name="document", truncate_dim=None, similarity_fn_name=None
    )
    older = {
        f"pooling_mode_{mode}": mode == "mean_tokens" for mode in ("cls_token", "mean_tokens", "lasttoken")
    }
    (path / POOLING).write_text(json.dumps({"word_embedding_dimension": 32} | older))
    tiny_foreign.edit(path / BERT, unpad_inputs=False, processing_kwargs={}, max_seq_length=20)
    theirs, embedder = loaded(path)
    expected = theirs.encode([*TEXTS, LONG])
    assert_close(embedder.encode([*TEXTS, LONG], "float32"), expected)
    assert_close(loaded(embedder.save_pretrained(tmp_path / "saved"))[0].encode([*TEXTS, LONG]), expected)


def expected_of(chunks):
    """Vectors of a document's chunks in float64; the positions turn as those of the released models."""
    config, tokenizer = tiny.model().config, tiny.tokenizer()
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1_000_000.0}
    model = Qwen3Model(config)
    model.load_state_dict(tiny.model().state_dict())
    return naive(model, [tokenizer(chunk, add_special_tokens=False)["input_ids"] for chunk in chunks])


def test_a_released_pplx_embed_checkpoint_loads_into_the_stock_class(tmp_path, monkeypatch):
    path = tiny_foreign.released(tmp_path / "perplexity" / "pplx-embed")
    assert len(list(path.glob("*.safetensors"))) > 1
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path))
    embedder = Embedder.from_pretrained("perplexity/pplx-embed", device="cpu")
    assert type(embedder.model) is Qwen3Model
    expected = np.concatenate([expected_of([text]) for text in TEXTS])
    assert_close(embedder.encode(TEXTS, "float32"), expected)
    for ours, document in zip(embedder.encode_documents(DOCUMENTS, "float32"), DOCUMENTS, strict=True):
        assert_close(ours, expected_of(document))
    stock = SentenceTransformer(str(embedder.save_pretrained(tmp_path / "stock")), device="cpu")
    assert not hasattr(stock[0].config, "auto_map")
    assert_close(stock.encode(TEXTS), expected)


def test_a_name_that_nobody_has_is_refused():
    with pytest.raises(ValueError, match=r"a Hub name with its organisation \(google-bert/"):
        load("bert-base-uncased")
    with pytest.raises(ValueError, match="nobody/nothing is no directory here"):
        load("nobody/nothing")


@pytest.fixture
def saved(tmp_path):
    return backbone.save(tiny.model(), tiny.tokenizer(), tmp_path / "m")


UNFIT = {
    "the architecture 'mamba7' is unknown to the installed transformers": {"model_type": "mamba7"},
    r"weights are not those .* another shape, the first is layers\.0": {"intermediate_size": 40},
}


@pytest.mark.parametrize(("message", "changed"), UNFIT.items())
def test_a_configuration_of_another_model_is_refused(saved, message, changed):
    tiny_foreign.edit(saved / "config.json", **changed)
    with pytest.raises(ValueError, match=message):
        load(saved)


def test_missing_weights_are_refused(tmp_path):
    shard = next(tiny_foreign.released(tmp_path / "a").glob("*.safetensors"))
    weights = load_file(shard)
    save_file({"extra.weight": weights.popitem()[1], **weights}, shard, {"format": "pt"})
    with pytest.raises(ValueError, match="weights are not those of its configuration; 1 are missing"):
        load(tmp_path / "a")


def test_broken_facts_are_refused(saved):
    (saved / "unmask.json").write_text("{")
    with pytest.raises(ValueError, match=r"unmask\.json is broken"):
        load(saved)


def test_what_its_reader_does_not_know_is_not_published(tmp_path):
    class OwnConfig(Qwen3Config):
        model_type = "own"

    class OwnModel(Qwen3Model):
        config_class = OwnConfig

    model = OwnModel(OwnConfig(**tiny.model().config.to_dict()))
    with pytest.raises(ValueError, match="the architecture 'own' is unknown to the installed transformers"):
        Embedder(model, tiny.tokenizer(), device="cpu").save_pretrained(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_without_anything_to_pad_with_is_not_saved(tmp_path):
    content = tiny.tokenizer().backend_tokenizer.to_str()
    backend = Tokenizer.from_str(content.replace(END_OF_TEXT, "<|other|>"))
    for role, embeds in (({}, False), ({"sep_token": "<|other|>"}, True)):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **role)
        embedder, path = Embedder(tiny.model(), tokenizer, device="cpu"), tmp_path / str(embeds)
        if embeds:  # of BERT's kind
            theirs = SentenceTransformer(str(embedder.save_pretrained(path)), device="cpu")
            assert_close(theirs.encode(TEXTS), embedder.encode(TEXTS, "float32"))
            continue
        with pytest.raises(ValueError, match="give it an eos token"):
            embedder.save_pretrained(path)
        assert not list(tmp_path.iterdir())


LAST = {"pooling": "last", "normalize": True, "max_length": 20, "window": 30}


@pytest.mark.parametrize("make", [tiny_foreign.bert, tiny_foreign.causal_qwen3, "llama", "olmo2", "qwen3"])
@pytest.mark.parametrize("options", [LAST, {"special_tokens": True}, {}])
def test_a_saved_embedder_comes_back_here_and_in_sentence_transformers(tmp_path, make, options):
    if isinstance(make, str):
        model, tokenizer = tiny_families.model(make, bidirectional=True), tiny.tokenizer()
    else:
        source = make(tmp_path / "a")
        model, tokenizer = backbone.load(source), backbone.load_tokenizer(source)
    embedder = Embedder(model, tokenizer, device="cpu", **options)
    path = embedder.save_pretrained(tmp_path / "deep" / "model")
    expected = embedder.encode([*TEXTS, LONG], "float32")
    theirs = SentenceTransformer(str(path), device="cpu", trust_remote_code=False)
    assert_close(theirs.encode([*TEXTS, LONG]), expected)
    again = Embedder.from_pretrained(path, device="cpu")
    np.testing.assert_array_equal(again.encode([*TEXTS, LONG], "float32"), expected)
    assert [again.max_length, again.window] == [embedder.max_length, options.get("window", again.positions)]
    assert Embedder.from_pretrained(path, pooling="mean").pooling == "mean"
    assert not [file for file in path.rglob("*") if file.suffix in (".py", ".bin", ".pt", ".pkl")]
    if not options:
        inputs = AutoTokenizer.from_pretrained(path)(TEXTS[5], return_tensors="pt")
        with torch.no_grad():
            hidden_1LD = AutoModel.from_pretrained(path).eval()(**inputs).last_hidden_state
        assert_close(hidden_1LD[0].mean(0), expected[5])


# Letters, signs, digits and spaces follow the colon, which pre-tokenisation may join with some of them.
QUERIES = ["Read a table", "  ", ":", "/ a", "7 mean", "\n", "東京", "<|endoftext|>", "x" * 40, "'s a", "a "]
ANSWERS = ["from a file ", "from a file again\n", *tiny.TEXTS[:5], *["Number " * n for n in range(5, 9)]]
BEFORE = prompt(INSTRUCTIONS["contextual"])


@pytest.mark.parametrize("lengths", [(200, 200), (74, 9), (70, 8)])
def test_a_query_is_read_the_same_in_training_and_by_others(tmp_path, lengths):
    tokenizer, read = ending(tiny.tokenizer()), []
    facts = {"pooling": "last", "special_tokens": True, "prompts": {"query": BEFORE, "document": ""}}
    path = backbone.save(tiny.model(bidirectional=False), tokenizer, tmp_path / "model", **facts)
    rows = Dataset.from_dict({"query": QUERIES, "document": ANSWERS, "key": list(map(str, range(11)))})
    truncations = map(Truncation, lengths, (BEFORE, ""), (END_OF_TEXT, END_OF_TEXT))
    trained = token_pairs(Table(rows, "d", "", PlainTokenizer(tokenizer)), *truncations)
    embedder = Embedder.from_pretrained(path, device="cpu")
    for texts, length in (([BEFORE + query for query in QUERIES], lengths[0]), (ANSWERS, lengths[1])):
        read += [unit.sequence.tokens_L.tolist() for unit in embedder._texts(texts, length).units]
    assert [ids.tolist() for ids in [*trained.queries, *trained.documents]] == read
    theirs = SentenceTransformer(str(embedder.save_pretrained(tmp_path / "saved")), device="cpu")
    expected = embedder.encode([BEFORE + query for query in QUERIES], "float32")
    assert_close(theirs.encode(QUERIES, prompt_name="query"), expected)
