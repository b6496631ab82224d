"""ToolRet: the public layout read from a mirror, and metrics by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

import tiny
from unmask.evaluation.metrics import retrieval_metrics
from unmask.evaluation.search import similarity
from unmask.evaluation.toolret import (
    METRICS,
    QUERIES,
    TOOLS,
    by_category,
    evaluate_toolret,
    instructed,
    load_toolret,
    tool_metrics,
)
from unmask.models.embedder import Embedder

CODE = ["Open a file.", "Close a file.", "Sort a list.", "Compute a mean."]
WEB = [
    "Search the web.",
    "Send a message.",
    "Book a flight.",
    "Read the news.",
    "Play a song.",
    "Weather today.",
]


def write(folder: Path, configs: dict[str, list[dict]], split: str) -> None:
    """A repository as the Hub has it: a Parquet file per configuration, and a README that names them."""
    lines = ["---", "configs:"]
    for name, rows in configs.items():
        file = folder / name / f"{split}.parquet"
        file.parent.mkdir(parents=True)
        Dataset.from_list(rows).to_parquet(str(file))
        lines += [
            f"- config_name: {name}",
            "  data_files:",
            f"  - split: {split}",
            f"    path: {name}/*.parquet",
        ]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def query(id: str, text: str, category: str, *tools: str) -> dict:
    labels = [{"id": tool, "doc": {}, "relevance": 1} for tool in tools]
    return {
        "id": id,
        "query": text,
        "instruction": f"Find tools for {text}",
        "labels": json.dumps(labels),
        "category": category,
    }


@pytest.fixture
def repositories(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path / "mirror"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    tools = {
        "code": [{"id": f"c{i}", "documentation": text} for i, text in enumerate(CODE)],
        "web": [{"id": f"w{i}", "documentation": text} for i, text in enumerate(WEB)],
    }
    queries = {
        "files": [query("f1", "open and close", "code", "c0", "c1"), query("f2", "mean", "code", "c3")],
        "travel": [query("t1", "flight and weather", "web", "w2", "w5")],
    }
    write(tmp_path / "mirror" / TOOLS, tools, "tools")
    write(tmp_path / "mirror" / QUERIES, queries, "queries")
    return tmp_path / "mirror"


def test_metrics_by_hand():
    # Ranks of the relevant ones: 1 and 3 of two; 2, with the other of two beyond the tenth.
    ids = np.array([[4, 9, 5, *range(20, 27)], [8, 1, *range(20, 28)]])
    found = tool_metrics(ids, [{4, 5}, {1, 2}])
    ideal = 1 + 1 / np.log2(3)
    assert found == pytest.approx(
        {
            "ndcg@10": (1 + 1 / np.log2(4) + 1 / np.log2(3)) / ideal / 2,
            "precision@10": (0.2 + 0.1) / 2,
            "recall@10": (1 + 0.5) / 2,
            "completeness@10": 0.5,
        }
    )


def test_the_public_layout_is_read(repositories):
    data = load_toolret()
    assert data.tools == CODE + WEB
    files, travel = data.tasks
    assert (files.name, files.category, files.relevant) == ("files", "code", [{0, 1}, {3}])
    assert (travel.category, travel.relevant) == ("web", [{len(CODE) + 2, len(CODE) + 5}])
    assert travel.instructions == ["Find tools for flight and weather"]


def test_a_label_without_its_tool_is_named(repositories):
    (repositories / QUERIES / "travel" / "queries.parquet").unlink()
    rows = [query("t1", "flight", "web", "w99")]
    Dataset.from_list(rows).to_parquet(str(repositories / QUERIES / "travel" / "queries.parquet"))
    with pytest.raises(ValueError, match=r"travel, query t1: no such tool: \['w99'\]"):
        load_toolret()


def test_without_mirror_and_hub_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path))
    with pytest.raises(OSError, match=r"ToolRet-Tools: neither in a mirror .*HF_HUB_OFFLINE"):
        load_toolret()


@pytest.mark.parametrize("instructions", [True, False])
def test_scores_equal_those_of_the_score_matrix(repositories, instructions):
    data, embedder = load_toolret(), Embedder(tiny.model(), tiny.tokenizer())
    rows = evaluate_toolret(embedder, data, instructions=instructions, precision="float32")
    tools_MD = embedder.encode(data.tools, "float32")
    for row, task in zip(rows, data.tasks, strict=True):
        queries = task.queries
        if instructions:
            queries = [instructed(q, i) for q, i in zip(queries, task.instructions, strict=True)]
        scores_NM = similarity(embedder.encode(queries, "float32"), tools_MD)
        naive = retrieval_metrics(scores_NM, task.relevant)
        assert row["ndcg@10"] == pytest.approx(naive["ndcg@10"])
        assert row["completeness@10"] == 1.0  # ten tools in all


def test_the_average_counts_categories_alike():
    rows = [
        {"task": str(i), "category": category} | dict.fromkeys(METRICS, value)
        for i, (category, value) in enumerate([("web", 0.2), ("web", 0.4), ("code", 0.9)])
    ]
    table = {row["category"]: row["ndcg@10"] for row in by_category(rows)}
    assert table == pytest.approx({"web": 0.3, "code": 0.9, "average": 0.6})


def test_an_instruction_is_optional():
    assert instructed("q", "find") == "Instruct: find\nQuery: q" and instructed("q", "") == "q"
