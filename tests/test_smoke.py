"""The whole recipe, every notebook, at toy size: real harvest, real trainings, real merge."""

import json
import os
import subprocess
import sys

import nbformat
import pytest

from by_hand import cells, kernel
from chat_servers import chat_server
from toy_checkout import unmask
from unmask.data.sources import open_corpus
from unmask.store import repository
from unmask_study.evidence import VERDICTS
from unmask_study.report import GATES
from unmask_study.settings import load_preset

STAGES = [path.stem for path in sorted((repository() / "notebooks").glob("*.ipynb"))]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    artifacts = tmp_path_factory.mktemp("artifacts")
    environment = os.environ | {"UNMASK_ARTIFACTS": str(artifacts)}
    # As `make smoke`.
    command = [sys.executable, "-m", "unmask_study", "run", "--preset", "smoke", "--jobs", "2"]
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 900}
    return subprocess.run(command, cwd=repository(), **options), artifacts


@pytest.mark.slow
def test_the_whole_pipeline_runs_and_reports(smoke):
    done, _ = smoke
    assert done.returncode == 0, done.stdout + done.stderr
    results = repository() / "results" / "smoke"
    claims = json.loads((results / "claims.json").read_text())
    assert all(claim["verdict"] in VERDICTS for claim in claims)
    told = {claim["key"]: claim["verdict"] for claim in claims}
    assert len(told) == 10 and told["diffusion-causal"] == "not asked"
    assert told["triplet"] in ("one run", "invalid")
    assert "not run" not in told.values()  # every other claim is computed from what the notebooks kept
    assert not any("no gates of" in claim["why"] for claim in claims)  # what they rest on is named as saved
    assert "**not asked**" in (results / "report.md").read_text()
    for notebook, training in GATES.values():  # which notebook 12 asks by name
        assert json.loads((results / f"{notebook}.json").read_text())["gates"][training]
    assert set(STAGES) <= set(json.loads((results / "provenance.json").read_text())["stages"])
    for stage in STAGES:
        notebook = nbformat.read(repository() / "papermill_runs" / "smoke" / f"{stage}.ipynb", as_version=4)
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        # 02a draws what a language model wrote, and none is asked.
        drawn = any("image/png" in one.get("data", {}) for one in outputs)
        assert drawn or stage == "02a_synthesis", f"{stage} shows no figure"


@pytest.fixture
def finished(smoke, monkeypatch):
    """The folder of its checkpoints, as this process sees it now."""
    _, artifacts = smoke
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(artifacts))
    return artifacts


@pytest.mark.slow
def test_again_it_has_nothing_to_do_and_a_changed_value_concerns_what_depends_on_it(finished):
    assert "nothing to do" in unmask("run", "--preset", "smoke").stdout
    plan = unmask("run", "--preset", "smoke", "--set", "contextual.steps=9", "--dry-run").stdout
    due = [stage for stage in STAGES if stage in plan]
    later = ["04_triplet", "05_merge", "06_quantization", "08_conteb", "08a_insent", "09_retrieval"]
    later += ["09a_public", "11_qwen3_embedding"]
    assert due == ["03_contextual", *later, "12_report"], plan


@pytest.mark.slow
def test_a_reader_answers_from_what_was_found_and_a_log_asks(finished, monkeypatch):
    """A reader that repeats what it is told contains an answer where a passage does; of a query that begins a
    document all systems find it."""
    monkeypatch.setattr("unmask_study.tasks.PACKAGE", "no_such_package")  # all-MiniLM takes its time
    pairs = open_corpus(load_preset("smoke").data).pairs("test").to_list()
    kinds = zip(["en", "de"] * 18, ["Exploratory", "Navigational", "Other"] * 12, pairs)
    keys = "query", "language", "intent", "form", "url"
    log = [(row["document"][:60], *kind, "Keyword-based", row["package"]) for *kind, row in kinds]
    lines = (json.dumps(dict(zip(keys, row))) + "\n" for row in log)
    (finished / "log.jsonl").write_text("".join(lines))
    changes = {"retrieval.log": str(finished / "log.jsonl"), "retrieval.pool": ["bm25", "characters", "lsa"]}
    with chat_server(write=lambda prompt: prompt) as server, kernel() as shell:
        changes |= {"reader.endpoint": server.url, "reader.model": "echo", "reader.questions": 20}
        for name in ("09_retrieval", "09a_public"):
            shell.run(*cells(name, changes))
    lab = repository() / "results" / "lab" / "smoke"
    found, public = (json.loads((lab / f"{n}.json").read_text()) for n in ("09_retrieval", "09a_public"))
    read = public["reader"]
    assert {"ours (INT8)", "ours (BIN)"} <= read.keys()
    assert read["no passages"]["functions"] < read["BM25"]["functions"] <= 1
    english, others = found["query_to_document"].values()
    assert {"ours (INT8)", "ours (BIN)", "BM25"} == english.keys() == others.keys() and english != others
    assert english.keys() <= found["query_to_query"].keys()
