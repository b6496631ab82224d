"""Our models under mteb: scores equal to ours, the Hub's layout from a mirror, appendix C, every type."""

import itertools
import re
from dataclasses import replace
from statistics import fmean

import mteb
import numpy as np
import pytest
from datasets import Dataset
from mteb.abstasks import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.mocks import MOCK_TASK_TEST_GRID_MONOLINGUAL, MockRerankingTask, MockRetrievalTask, MockSTSTask
from mteb.mocks.mock_tasks.reranking import MockAggregatedTask
from scipy.stats import spearmanr

import tiny
from by_hand import cells
from unmask.evaluation.metrics import retrieval_metrics
from unmask.evaluation.search import similarity
from unmask.evaluation.tasks import embed_task, score_task
from unmask.models.context_encoder import ContextEmbedder, ContextualEncoder
from unmask.models.embedder import Embedder, instructed
from unmask.models.reranker import Reranker
from unmask_study import mteb as in_mteb
from unmask_study.mteb import MtebEncoder, as_task, benchmark_tasks, run_benchmark
from unmask_study.report import markdown_table, paper_table
from unmask_study.settings import load_preset

CONFIG = load_preset("smoke", {"evaluation.precision": "fp32"}).evaluation
DOCUMENTS = [f"The {one} of number {i} likes {i % 7}." for i, one in enumerate(["fox", "owl", "bee"] * 12)]
QUERIES = [f"Who likes {i}?" for i in range(7)]
RELEVANT = [set(range(i, 7 * i + 7, 7)) & set(range(len(DOCUMENTS))) for i in range(7)]  # one, two, …


@pytest.fixture(scope="module")
def embedder():
    return Embedder(tiny.model(), tiny.tokenizer())


DATASET = {"path": "tests/animals", "revision": "0" * 40}
ABOUT = {"type": "Retrieval", "eval_langs": ["eng-Latn"], "main_score": "ndcg_at_10"}


class Animals(AbsTaskRetrieval):
    metadata = TaskMetadata(name="Animals", description="Of a test.", dataset=DATASET, **ABOUT)


@pytest.fixture
def animals(tmp_path, monkeypatch):
    """A mirror that holds the task's data, laid out as mteb's are on the Hub; nothing answers its last query.
    `benchmark_tasks` knows the task."""
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path / "mirror"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    known = in_mteb.benchmark_tasks
    monkeypatch.setattr(in_mteb, "benchmark_tasks", lambda n, *_: [Animals()] if n == "Animals" else known(n))
    gold = [(q, d) for q, found in enumerate(RELEVANT) for d in sorted(found)]
    tables = {
        "corpus": [{"_id": f"d{i:03}", "title": "", "text": text} for i, text in enumerate(DOCUMENTS)],
        "queries": [{"_id": f"q{i}", "text": text} for i, text in enumerate([*QUERIES, "Nobody?"])],
        "default": [{"query-id": f"q{q}", "corpus-id": f"d{d:03}", "score": 1} for q, d in gold],
    }
    folder = tmp_path / "mirror" / "tests" / "animals"
    for name, rows in tables.items():
        Dataset.from_list(rows).to_parquet(str(folder / name / "test.parquet"))
    files = {name: [{"split": "test", "path": f"{name}/test.parquet"}] for name in tables}
    tiny.write_card(folder, files)
    return tmp_path


def ndcg(scores_NM):
    ids = [f"d{i:03}" for i in range(len(DOCUMENTS))]
    return retrieval_metrics(scores_NM, RELEVANT, document_ids=ids)["ndcg@10"]


@pytest.mark.parametrize("precision", ["int8", "ubinary"])
def test_mteb_reads_a_mirror_and_scores_as_we_do(animals, embedder, precision):
    (row,) = run_benchmark(embedder, ["Animals"], CONFIG, animals / "results", precision=precision)
    assert row["why"] == "" and (row["benchmark"], row["task"]) == ("Animals", "Animals")
    q_ND = embedder.encode(QUERIES, precision, max_length=CONFIG.query_length)
    d_MD = embedder.encode(DOCUMENTS, precision, max_length=CONFIG.document_length)
    ours = ndcg(similarity(q_ND, d_MD))
    assert 0 < ours < 1 and row["score"] == pytest.approx(ours, abs=1e-5)  # mteb rounds to five digits
    late_first_NM = -similarity(q_ND, d_MD).numpy()[:, ::-1]  # as ties are broken
    found = len(DOCUMENTS) - 1 - np.argsort(late_first_NM, axis=1, kind="stable")[:, :10]
    hits = [len(right & set(ten)) for right, ten in zip(RELEVANT, found.tolist(), strict=True)]
    share = np.array([n / len(right) for n, right in zip(hits, RELEVANT, strict=True)])
    table5 = {"nDCG": ours, "P": np.mean(hits) / 10, "R": share.mean(), "C": (share == 1).mean()}
    assert table5["C"] < table5["R"] < 1 and (table5["C"] > 0 or precision == "ubinary")
    assert row["subsets"] == {"default": pytest.approx({"score": ours} | table5, abs=1e-5)}


def test_what_cannot_be_run_says_why_and_the_others_go_on(animals, embedder):
    (animals / "mirror" / "mteb" / "scifact").mkdir(parents=True)
    names = ["SciFact", "MIRACL", "Animals"]
    damaged, absent, found = run_benchmark(embedder, names, CONFIG, animals / "results")
    assert damaged["score"] is None and damaged["why"]
    assert absent["task"] == "MIRACLRetrievalHardNegatives" and absent["score"] is None
    assert "in no mirror" in absent["why"] and "HF_HUB_OFFLINE" in absent["why"]
    assert found["score"] is not None


def context_embedder(seed):
    encoder = ContextualEncoder(tiny.model(seed=seed), tiny.model(seed=1), 4)
    return ContextEmbedder(encoder, tiny.tokenizer())


def test_results_are_kept_until_the_model_or_the_code_changes(animals, embedder, monkeypatch):
    (first,) = run_benchmark(embedder, ["Animals"], CONFIG, animals / "results")
    with monkeypatch.context() as broken:
        broken.setattr(Embedder, "encode", lambda *_, **__: pytest.fail("encoded again"))
        assert run_benchmark(embedder, ["Animals"], CONFIG, animals / "results") == [first]
    several = [embedder, Embedder(tiny.model(seed=1), tiny.tokenizer())]
    (changed,) = run_benchmark(several[1], ["Animals"], CONFIG, animals / "results")
    assert changed["score"] != first["score"]
    several.append(Embedder(tiny.model(), tiny.tokenizer(), normalize=True))
    informed, other = map(context_embedder, range(2))  # whose first stages differ
    several += [informed, informed.with_context(["one"]), informed.with_context(["two"]), other]
    revisions = [MtebEncoder(one, CONFIG).mteb_model_meta.revision for one in several]
    monkeypatch.setattr(in_mteb, "code_hash", lambda: "other code")
    assert len({*revisions, MtebEncoder(embedder, CONFIG).mteb_model_meta.revision}) == len(several) + 1


def test_the_benchmarks_are_the_papers():
    with pytest.raises(KeyError, match="nosuch"):
        benchmark_tasks("nosuch")
    retrieval = ("MTEB(Multilingual, v2)", "MTEB(Code, v1)")
    multilingual, code = ({task.metadata.name for task in benchmark_tasks(name)} for name in retrieval)
    assert len(multilingual) == 18 and {"ArguAna", "MLQARetrieval", "WinoGrande"} < multilingual  # table 11
    assert len(code) == 12 and {"AppsRetrieval", "CosQA", "SyntheticText2SQL"} < code  # table 12
    table9 = {task.metadata.name: task for task in benchmark_tasks("table 9")}
    assert len(table9) == 12 and table9["MIRACLRetrievalHardNegatives"].hf_subsets == ["en"]
    assert table9["MSMARCO"].eval_splits == ["dev"]
    subsets = [len(task.hf_subsets) for name in ("MIRACL", "ToolRet") for task in benchmark_tasks(name)]
    assert subsets == [18, 35, 35]
    # Qwen3-Embedding, section 4.1 (its CMTEB has 32), and what table 4 adds; CDE's MTEB.
    sizes = {"MTEB(Multilingual, v2)": 131, "MTEB(eng, v2)": 41, "MTEB(cmn, v1)": 31, "MTEB(Code, v1)": 12}
    sizes |= {"MLDR": 1, "FollowIR": 3, "MTEB(eng, v1)": 56}
    assert {name: len(benchmark_tasks(name, True)) for name in sizes} == sizes
    assert [len(benchmark_tasks(name)) for name in ("MTEB(eng, v2)", "FollowIR", "MLDR")] == [10, 3, 1]
    named = {name: float(name.startswith("to")) for name in benchmark_tasks("ToolRet")[0].hf_subsets}
    scores = {name: {"nDCG": x, "P": 0.0, "R": 1.0, "C": 1 - x} for name, x in named.items()}
    table = in_mteb.tool_kinds(scores)
    assert [*table] == [*paper_table(5)["bm25"]]
    kinds = {"Code nDCG": 1 / 7, "Custom nDCG": 3 / 9, "Web nDCG": 5 / 19, "Avg nDCG": 0.2465}
    assert table == pytest.approx(table | kinds | {"Web C": 14 / 19}, abs=1e-4)
    assert benchmark_tasks("MLQARetrieval")[0].eval_splits == ["validation", "test"]


def test_notebook_09a_puts_requests_with_instructions_beside_table_5_and_others_below():
    (cell,) = (source for source in cells("09a_public") if "tool_kinds" in source)
    tasks, shown = benchmark_tasks("ToolRet"), []
    subsets = dict.fromkeys(tasks[0].hf_subsets, dict.fromkeys(in_mteb.MEASURES, 0.0))
    row = {"precision": "INT8", "benchmark": "ToolRet", "subsets": subsets}
    names = {"benchmarks": [row | {"task": task.metadata.name} for task in tasks], "itertools": itertools}
    names |= {"mteb": in_mteb, "paper_table": paper_table, "markdown_table": markdown_table, "Markdown": str}
    exec(cell, names | {"percent": dict, "display": shown.append})
    systems = re.findall(r"^\| (\S+: .*?|ours .*?) \|", shown[0], re.M)
    paper = ["paper: pplx-embed-v1-0.6B", "paper: bm25"]
    assert systems == [*paper, "ours (INT8)", "ours (INT8), without instructions"]


def encode(encoder, name, kind, *texts):
    about = {"task_metadata": mteb.get_task(name).metadata, "prompt_type": mteb.types.PromptType(kind)}
    return encoder.encode([{"text": [text]} for text in texts], **about)


def test_arguana_queries_get_the_prompt_and_nothing_else_does(embedder):
    encoder, text = MtebEncoder(embedder, CONFIG), "Tea is red."
    prompt = "Given a claim, find documents that refute the claim. Claim: "
    prompted, plain = (embedder.encode([x + text], max_length=CONFIG.query_length) for x in (prompt, ""))
    assert (encode(encoder, "ArguAna", "query", text) == prompted).all() and (prompted != plain).any()
    for name, kind in (("ArguAna", "document"), ("SCIDOCS", "query")):
        assert (encode(encoder, name, kind, text) == plain).all()


def test_equal_documents_of_text2sql_are_told_apart_always_in_the_same_way(embedder):
    encoder, name, texts = MtebEncoder(embedder, CONFIG), "SyntheticText2SQL", ("SELECT 1", "SELECT 1", "S")
    noised, again = (encode(encoder, name, "document", *texts) for _ in range(2))
    exact = embedder.encode(texts, max_length=CONFIG.document_length)
    assert (noised == again).all() and (noised[0] != noised[1]).any()
    assert np.abs(noised - exact).max() < 1  # less than a step of INT8
    assert (encode(encoder, name, "query", *texts) == exact).all()


LONG = " ".join(f"word{i}" for i in range(200))


def test_lengths_are_the_presets_but_for_long_documents(embedder):
    encoder, lengths = MtebEncoder(embedder, CONFIG), dict.fromkeys(["SCIDOCS"], CONFIG.document_length)
    lengths |= dict.fromkeys(["LEMBPasskeyRetrieval", "MultiLongDocRetrieval"])  # the model's positions
    vectors = {name: encode(encoder, name, "document", LONG) for name in lengths}
    for name, length in lengths.items():
        assert (vectors[name] == embedder.encode([LONG], max_length=length)).all()
    assert (vectors["SCIDOCS"] != vectors["MultiLongDocRetrieval"]).any()
    assert (in_mteb.LENGTHS["MultiLongDocRetrieval"], in_mteb.LENGTHS["MTEB(eng, v1)"]) == (8192, 512)


def test_a_benchmark_is_read_at_a_length_of_its_own(animals, embedder, monkeypatch):
    monkeypatch.setattr(in_mteb, "benchmark_tasks", lambda *_: [Animals()])
    monkeypatch.setitem(in_mteb.LENGTHS, "Zoo", 3)
    usual, short = run_benchmark(embedder, ["Animals", "Zoo"], CONFIG, animals / "results")
    config = replace(CONFIG, query_length=3, document_length=3)
    (again,) = run_benchmark(embedder, ["Animals"], config, animals / "again")
    assert short["score"] == again["score"] != usual["score"]


def test_a_query_with_an_instruction_comes_after_it_and_equal_corpora_are_encoded_once(embedder, monkeypatch):
    encoder, name = MtebEncoder(embedder, CONFIG), "ToolRetrievalInstruction"
    batch = {"query": ["a", "b"], "instruction": ["Do", None], "text": ["a Do", "b"]}
    metadata = mteb.get_task(name).metadata
    found = encoder.encode([batch], task_metadata=metadata, prompt_type=mteb.types.PromptType.query)
    expected = embedder.encode([instructed("Do", "a"), "b"], max_length=CONFIG.query_length)
    assert (found == expected).all()
    first = encode(encoder, name, "document", "a tool", "")
    monkeypatch.setattr(Embedder, "encode", lambda *_, **__: pytest.fail("encoded again"))
    assert (encode(encoder, name, "document", "a tool", "") == first).all()


def test_a_search_of_mtebs_is_a_task_of_ours(animals, embedder, monkeypatch):
    task = as_task(Animals())
    assert (task.queries, task.relevant, task.chunks) == (QUERIES, RELEVANT, DOCUMENTS)  # nobody is left out
    (row,) = run_benchmark(embedder, ["Animals"], CONFIG, animals / "results")
    known = embed_task(embedder, task, CONFIG, late_chunking=True)  # of texts alone, late chunking or not
    assert score_task(task, known).mean() == pytest.approx(row["score"], abs=1e-5)
    again = Animals()
    assert as_task(again) == as_task(again) == task  # mteb's benchmarks hand out the same tasks each time
    monkeypatch.delenv("UNMASK_MIRROR")
    with pytest.raises(ValueError, match=r"tests/animals is in no mirror .*HF_HUB_OFFLINE"):
        as_task(Animals())


# --- every type of task


@pytest.fixture
def made_up(monkeypatch):
    """`benchmark_tasks` knows the tasks that mteb makes up for its own tests, of every type; they need no
    data."""
    every = {task.metadata.name: task for task in [*MOCK_TASK_TEST_GRID_MONOLINGUAL, Forums()]}
    monkeypatch.setattr(in_mteb, "benchmark_tasks", lambda name, *_: [every[n] for n in name.split()])
    monkeypatch.setattr(in_mteb, "_unreachable", lambda: "")
    return every


class Forums(MockAggregatedTask):
    """A mean over tasks, as CQADupstack."""

    metadata = MockAggregatedTask.metadata.model_copy(
        update={"name": "Forums", "type": "Retrieval", "tasks": [MockRetrievalTask(), MockRerankingTask()]}
    )


@pytest.mark.parametrize("instruct", [True, False], ids=["instructions", "context"])
def test_tasks_of_every_type_are_run(made_up, embedder, tmp_path, instruct):
    model, precision = (embedder, "float32") if instruct else (context_embedder(0), "int8")
    rows = run_benchmark(model, [" ".join(made_up)], CONFIG, tmp_path, precision, True, instruct)
    assert {row["task"]: row["why"] for row in rows} == dict.fromkeys(made_up, "")
    kinds = [task.metadata.type for task in mteb.get_benchmark("MTEB(Multilingual, v2)").tasks]
    assert {*kinds, "Summarization"} <= {row["type"] for row in rows}
    scores = {row["task"]: row["score"] for row in rows}
    parts = [scores["MockRetrievalTask"], scores["MockRerankingTask"]]
    assert scores["Forums"] == pytest.approx(fmean(parts))


def test_a_benchmarks_mean_is_over_tasks_and_over_types_and_systems_stand_side_by_side():
    type_means, side_by_side = in_mteb.type_means, in_mteb.side_by_side
    scores = [("STS", 0.2), ("STS", 0.4), ("Retrieval", 0.9)]
    rows = [{"type": kind, "score": score} for kind, score in scores]
    means = {"mean (task)": 0.5, "mean (type)": 0.6, "STS": 0.3, "Retrieval": 0.9}
    assert type_means(rows) == pytest.approx(means)
    assert type_means([*rows, {"type": "STS", "score": None}]) == {"Retrieval": 0.9} and type_means([]) == {}
    one = {"benchmark": "B", "task": "T", "score": 0.5, "why": ""}
    other = {"benchmark": "B", "task": "U", "score": None, "why": "no data"}
    first, second = side_by_side({"a": [one, other], "b": [one | {"score": 0.7}], "none": []})
    assert first == {"benchmark": "B", "task": "T", "a": 0.5, "why": "", "b": 0.7}
    assert second == {"benchmark": "B", "task": "U", "a": None, "why": "no data"}


def test_both_sides_of_a_pair_come_after_the_instruction_and_documents_do_not(made_up, embedder, tmp_path):
    (row,) = run_benchmark(embedder, ["MockSTSTask"], CONFIG, tmp_path, "float32", True, True)
    task = MockSTSTask()
    task.load_data()
    rows = task.dataset["test"]
    texts = [[instructed(task.metadata.prompt, text) for text in rows[x]] for x in ("sentence1", "sentence2")]
    a_ND, b_ND = (embedder.encode(x, "float32", max_length=CONFIG.document_length) for x in texts)
    expected = spearmanr(similarity(a_ND, b_ND).diagonal(), rows["score"]).statistic
    assert row["score"] == pytest.approx(expected, abs=1e-5)
    encoder, text = MtebEncoder(embedder, CONFIG, "float32", instruct=True), "Tea is red."
    told = mteb.get_task("ArguAna").metadata.prompt["query"]
    query = embedder.encode([f"Instruct: {told}\nQuery:{text}"], "float32", max_length=CONFIG.query_length)
    plain = embedder.encode([text], "float32", max_length=CONFIG.document_length)
    assert (encode(encoder, "ArguAna", "query", text) == query).all()
    assert (encode(encoder, "ArguAna", "document", text) == plain).all()


@pytest.mark.parametrize("own", [{}, {"Animals": 20}])
def test_the_best_documents_are_reranked_and_the_others_left_out(animals, embedder, monkeypatch, own):
    monkeypatch.setattr(in_mteb, "LENGTHS", own)
    read = replace(CONFIG, query_length=20, document_length=20) if own else CONFIG
    reranker = Reranker(tiny.model(bidirectional=False, head=True, length=1024), tiny.tokenizer())
    config = replace(load_preset("smoke").reranker, candidates=12)
    how = (CONFIG, animals / "results", "int8", False, True)
    (row,) = run_benchmark(embedder, ["Animals"], *how, (reranker, config))
    told = "Retrieve text based on user query."  # mteb's, for a search that has no instruction of its own
    q_ND = embedder.encode([instructed(told, query) for query in QUERIES], max_length=read.query_length)
    first_NM = similarity(q_ND, embedder.encode(DOCUMENTS, max_length=read.document_length)).numpy()
    final_NM = np.full(first_NM.shape, -1e9)
    limits = {"query_length": read.query_length, "document_length": read.document_length}
    for query, first_M, final_M in zip(QUERIES, first_NM, final_NM, strict=True):
        best = np.argsort(-first_M, kind="stable")[:12]
        texts = [DOCUMENTS[i] for i in best]
        final_M[best] = reranker.log_odds(query, texts, instruction=told, **limits)
    expected = retrieval_metrics(final_NM, RELEVANT)["ndcg@10"]
    assert row["why"] == "" and row["score"] == pytest.approx(expected, abs=1e-5)
    for others in ((), [(reranker, replace(config, candidates=5))]):  # without one, and fewer candidates
        assert run_benchmark(embedder, ["Animals"], *how, *others)[0]["score"] != row["score"]


def test_a_contextual_encoder_reads_the_tasks_own_documents(animals):
    contextual = context_embedder(0)
    (row,) = run_benchmark(contextual, ["Animals"], CONFIG, animals / "results")
    task = Animals()
    where = DATASET | {"path": str(animals / "mirror/tests/animals")}
    task.metadata = task.metadata.model_copy(update={"dataset": where})
    task.load_data()
    drawn = in_mteb.context_texts(task, "default", 4)
    assert len({*drawn}) == 4 and {*drawn} < {*DOCUMENTS}
    ready = contextual.with_context(drawn, max_length=CONFIG.document_length)

    def score(one):
        q_ND = one.encode(QUERIES, max_length=CONFIG.query_length)
        return ndcg(similarity(q_ND, one.encode(DOCUMENTS, max_length=CONFIG.document_length)))

    assert row["score"] == pytest.approx(score(ready), abs=1e-5)
    foreign = contextual.with_context(["Something else."])  # a context that it has stays: CDE's "random"
    (other,) = run_benchmark(foreign, ["Animals"], CONFIG, animals / "results")
    assert other["score"] == pytest.approx(score(foreign), abs=1e-5)


def test_context_is_drawn_from_what_a_task_reads(made_up):
    for name, expected in {"MockSTSTask": 4, "MockClusteringTask": 3, "MockRetrievalTask": 2}.items():
        made_up[name].load_data()
        made_up[name].convert_v1_dataset_format_to_v2(None) if "Retrieval" in name else None
        texts = in_mteb.context_texts(made_up[name], "default", 100)
        assert len(texts) >= expected and all(isinstance(text, str) for text in texts)
    assert any(text.startswith("Title of d1 ") for text in texts)
