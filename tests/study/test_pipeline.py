"""The graph of notebooks: selection, and what makes a notebook due."""

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from unmask.config import ParallelConfig
from unmask.store import artifacts_root, read_json, write_atomic
from unmask_study import pipeline
from unmask_study.pipeline import Pipeline, discover, kernel_environment
from unmask_study.run import Folders
from unmask_study.settings import Preset, load_preset

RAN = {"exit_status": 0, "wall_seconds": 40.0, "whole_seconds": 40.0}


@pytest.fixture
def diamond(checkout):
    """00 → {01, 02} → 03, and 04 apart."""
    checkout.notebook("00_backbone")
    checkout.notebook("01_left", needs=["00_backbone"], reads=["pair"])
    checkout.notebook("02_right", needs=["00_backbone"])
    checkout.notebook("03_join", needs=["01_left", "02_right"])
    checkout.notebook("04_apart")
    return checkout


def opened(checkout, overrides=None, data=""):
    return Pipeline(checkout.folders, load_preset("smoke", overrides), overrides or {}, data)


def finish(checkout, *names):
    """Marks notebooks as done, as their execution would; without names all."""
    made = opened(checkout)
    for one in made.notebooks:
        if not names or one.name in names:
            write_atomic(checkout.folders.executed / f"{one.name}.ipynb", "")
            write_atomic(checkout.folders.results / f"{one.name}.json", "{}")
            made.finish(one, 0.0)


def recorded(checkout):
    return read_json(checkout.folders.results / "provenance.json")["stages"]


def reasons(checkout, overrides=None):
    """Why notebooks are due."""
    made = opened(checkout, overrides)
    return {one.name: why for one in made.notebooks if (why := made.why_due(one))}


def planned(checkout, only=None, **options):
    made = opened(checkout)
    return {one.name: why for one, why in made.plan(made.select(only=only), **options).items()}


def names(notebooks):
    return [one.name for one in notebooks]


def test_other_data_are_due_where_they_are_read(diamond):
    one, two = (opened(diamond, data=data).depends_on for data in ("one", "another"))
    changed = [name for name in one if one[name]["data"] != two[name]["data"]]
    assert changed == ["00_backbone", "02_right", "03_join", "04_apart"]


def test_a_model_that_is_replaced_at_its_path_counts(diamond):
    weights = diamond.root / "base" / "model.safetensors"
    write_atomic(weights, "old weights" * 10**5)
    at = {"backbone.checkpoint": str(weights.parent), "retrieval.pool": ["bm25", str(weights.parent)]}
    diamond.notebook("05_more", reads=["backbone"])
    diamond.notebook("06_search", reads=["retrieval"])
    before = opened(diamond, at).depends_on
    write_atomic(weights, "new weights" * 10**5)
    now = opened(diamond, at).depends_on
    assert [name for name in now if now[name] != before[name]] == ["05_more", "06_search"]
    write_atomic(weights.with_name("config.json"), "one")
    before = opened(diamond, at).depends_on
    os.utime(weights.with_name("config.json"))  # copied again
    assert opened(diamond, at).depends_on == before


def test_results_that_another_run_wrote_are_made_again(diamond):
    finish(diamond)
    write_atomic(diamond.folders.results / "04_apart.json", '{"by": "other artifacts"}')
    assert reasons(diamond) == {"04_apart": "executed notebook or results are missing, or others'"}


def test_what_is_taken_is_not_missed(diamond):
    diamond.notebook("05_report", needs=["00_backbone"], takes=["03_join"])

    def inputs():
        return {key for key in opened(diamond).depends_on["05_report"] if key.startswith("input")}

    finish(diamond, "00_backbone")
    assert list(planned(diamond, only="05")) == ["05_report"]
    assert inputs() == {"input 00_backbone"}
    finish(diamond, "03_join")
    assert inputs() == {"input 00_backbone", "input 03_join"}
    # What the report could not have yet makes it due with what brings it.
    (diamond.folders.artifacts / "03_join" / "done.json").unlink()
    finish(diamond, "01_left", "02_right", "04_apart", "05_report")
    assert planned(diamond) == {"03_join": "not done yet", "05_report": "input 03_join is new"}


SELECTED = {
    "several, in running order": ({"only": "03_join,01"}, ["01_left", "03_join"]),
    "from": ({"start": "02"}, ["02_right", "03_join", "04_apart"]),
    "to": ({"stop": "02"}, ["00_backbone", "01_left", "02_right"]),
    "from and to": ({"start": "02", "stop": "03"}, ["02_right", "03_join"]),
    "unknown": ({"only": "03_joi"}, "no notebook '03_joi'; did you mean '03_join'"),
    "only and from": ({"only": "01", "start": "00"}, "no notebook is left"),
    "to before from": ({"start": "02", "stop": "01"}, "no notebook is left"),
}


@pytest.mark.parametrize(("options", "found"), SELECTED.values(), ids=SELECTED)
def test_selection(diamond, options, found):
    """Of notebooks that say what they depend on, without JupyterLab's copies."""
    (diamond.folders.notebooks / "01_left-Copy1.ipynb").touch()
    (diamond.folders.notebooks / "09_own.ipynb").write_text('{"cells": [], "metadata": {}}')
    with pytest.raises(ValueError, match=found) if isinstance(found, str) else nullcontext():
        assert names(opened(diamond).select(**options)) == found


def test_what_changed_is_the_reason_and_concerns_those_who_depend_on_it(diamond):
    assert set(reasons(diamond).values()) == {"not done yet"}
    finish(diamond)
    assert reasons(diamond) == {}
    after = {"03_join": "input 01_left changed"}
    changed = {"pair.steps": 11, "merge.t": [0.4]}
    assert reasons(diamond, changed) == {"01_left": "preset section pair changed"} | after
    diamond.notebook("01_left", ["x = 1"], needs=["00_backbone"], reads=["pair"])
    (diamond.folders.executed / "04_apart.ipynb").unlink()
    (diamond.folders.results / "02_right.json").unlink()
    after |= dict.fromkeys(("02_right", "04_apart"), "executed notebook or results are missing, or others'")
    assert reasons(diamond) == {"01_left": "notebook changed"} | after


def test_code_of_the_library_counts_and_comments_and_layout_do_not(diamond):
    library = diamond.folders.library
    assert library.is_relative_to(diamond.root), "this test writes into it"
    assert all((library / name).is_file() for name in pipeline.ASIDE)
    finish(diamond)
    module = library / "unmask_study" / "run.py"
    source = module.read_text()
    (library / "unmask_study" / "cli.py").write_text("")
    code = source[source.index("\n\nimport") :].replace("\ndef ", "\ndef  ")
    module.write_text('"""Another docstring."""\n\n# and a comment' + code)
    assert reasons(diamond) == {}
    module.write_text(source + "\nx = 1\n")
    found = reasons(diamond)
    assert len(found) == 5 and all(why.endswith("library changed") for why in found.values())


def test_prose_and_what_a_reader_leaves_in_a_notebook_do_not_count(diamond):
    finish(diamond)
    diamond.notebook("04_apart", prose="# A better question")
    path = diamond.folders.notebooks / "01_left.ipynb"
    document = json.loads(path.read_text())
    for cell in document["cells"]:
        cell["metadata"]["execution"] = {"iopub.status.busy": "2026-01-01T00:00:00Z"}
        cell["source"] = cell["source"].splitlines(keepends=True)
        cell["source"] += ["\nrun = 'mine'"] if "parameters" in cell["metadata"]["tags"] else []
        if cell["cell_type"] == "code":
            cell["execution_count"] = 7
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "hello"}]
    document["metadata"] |= {"kernelspec": {"name": "other"}, "language_info": {"version": "3.12.1"}}
    path.write_text(json.dumps(document))
    assert reasons(diamond) == {}


def test_a_notebook_made_from_an_old_input_stays_due(diamond):
    """`--only 03` with 01 out of date: the record names the input as it was."""
    finish(diamond)
    changed = {"pair.steps": 11}
    made = opened(diamond, changed)
    made.finish(made.select(only="03")[0], 0.0)
    assert reasons(diamond, changed)["03_join"] == "input 01_left changed"


def test_a_record_keeps_what_of_the_preset_was_otherwise_when_its_notebook_ran(diamond):
    notebooks = discover(diamond.folders.notebooks)
    for notebook, steps in zip(notebooks[:4], (11, 12, 11, 11), strict=True):
        made = opened(diamond, {f"pair.{key}": steps for key in ("steps", "seed", "keep_tokens")})
        made.record(notebook, RAN, made.describe("unmask run"))
    kept = {name: one["otherwise"] for name, one in recorded(diamond).items()}
    old = {"pair.steps": 12}  # what is made from it, too
    assert kept == {"00_backbone": {}, "01_left": old, "02_right": {}, "03_join": old}


def test_a_whole_time_is_that_of_a_run_from_nothing(diamond):
    """What a notebook had prepared for trainings that it finds is in no log."""
    whole = []
    for seed, took, before in ((1, 90, 0), (1, 11, 7), (5, 11, 7), (5, 9, 0)):
        made = opened(diamond, {"data.seed": seed})
        ran = RAN | {"wall_seconds": took, "whole_seconds": took + before}
        made.record(made.notebooks[0], ran, made.describe("unmask run"))
        whole.append(recorded(diamond)["00_backbone"]["whole_seconds"])
    assert whole == [90, 90, 18, 9]


def test_a_record_tells_the_content_of_what_was_read(diamond, monkeypatch):
    card = artifacts_root() / "data" / "environment-1" / "card.json"
    elsewhere = diamond.root / "environment-2" / "card.json"
    monkeypatch.setenv("UNMASK_CORPUS", str(elsewhere.parent))
    for data, path, families in (("environment-1", card, ["code"]), ("environment-2", elsewhere, [])):
        write_atomic(path, json.dumps({"hash": data}))
        made = opened(diamond, {"data.families": families}, data=data)
        for notebook in made.notebooks[:2]:
            made.record(notebook, RAN, made.describe("unmask run"))
        kept = recorded(diamond).values()
        assert [one["corpus_hash"] for one in kept] == ["-".join([data, *families]), None]


def test_what_pools_the_seeds_is_due_again_when_one_of_them_changes(diamond):
    diamond.notebook("05_report", needs=["01_left"], reads=[], seeds="pooled")
    diamond.notebook("06_aside", needs=["01_left"], reads=[], seeds="once")
    assert [one.number for one in opened(diamond).select(again=1)] == ["00", "01", "02", "03", "04"]
    finish(diamond)
    other = Folders("smoke-seed1").results
    write_atomic(other / "02_right.json", '{"irrelevant": 1}')
    assert reasons(diamond) == {}
    for value in (1, 2):
        write_atomic(other / "01_left.json", json.dumps({"found": value}))
        assert reasons(diamond) == {"05_report": "run smoke-seed1 changed"}
        finish(diamond)
    write_atomic(other / "scores" / "01_left.parquet", "copied later")
    assert reasons(diamond) == {"05_report": "run smoke-seed1 changed"}


def test_plan_keeps_the_order_and_refuses_missing_inputs(diamond):
    assert list(planned(diamond)) == names(opened(diamond).notebooks)
    with pytest.raises(ValueError, match="01_left needs the output of 00_backbone, which is not done"):
        planned(diamond, only="01")
    finish(diamond)
    assert planned(diamond) == {}
    assert planned(diamond, only="01", force=True) == {"01_left": "forced"}


MACHINES = {  # GPUs, processes, machines, --gpus, --jobs
    "no GPU": ((0, 2, 1, 2, 1), r"2 GPUs are needed on this machine, and it has 0: .*num_processes=2"),
    "too few GPUs": ((4, 8, 1, None, 1), "8 GPUs are needed on this machine, and it has 4: --gpus 4"),
    "too few visible": (("0,1", 4, 1, None, 1), "4 GPUs are needed on this machine, and it has 2"),
    "no launcher": ((8, 16, 2, None, 1), "trainings on 2 machines need parallel.launcher"),
    "side by side": ((4, 2, 1, 2, 2), "takes all of them: --jobs 1"),
    "processes on CPUs": ((0, 2, 1, None, 2), ""),
    "one, on the CPU": ((0, 1, 1, 1, 2), ""),
    "all GPUs": ((4, 4, 1, 4, 1), ""),
}


@pytest.mark.parametrize(("machine", "refused"), MACHINES.values(), ids=MACHINES)
def test_a_machine_that_cannot_is_refused(monkeypatch, machine, refused):
    here, processes, machines, gpus, jobs = machine
    monkeypatch.setenv(
        "CUDA_VISIBLE_DEVICES", here if isinstance(here, str) else "0,1,2,3,4,5,6,7"[: 2 * here]
    )
    monkeypatch.setattr(pipeline, "gpu_names", lambda: ["GPU"] * 8)
    parallel = ParallelConfig(num_processes=processes, num_machines=machines)
    preset = replace(load_preset("smoke"), parallel=parallel)
    with pytest.raises(ValueError, match=refused) if refused else nullcontext():
        pipeline.check_machine(preset, gpus, jobs)


SEEN = [
    (None, 8, 2, 1, {"CUDA_VISIBLE_DEVICES": "0,1"}),
    ("3,5,7", 8, 4, 2, {"CUDA_VISIBLE_DEVICES": "3,5"}),
    (None, 2, 2, 1, {}),
    (None, 0, 1, 1, {}),
]


@pytest.mark.parametrize(("known", "here", "processes", "machines", "seen"), SEEN)
def test_evaluation_sees_the_gpus_that_the_run_was_given(monkeypatch, known, here, processes, machines, seen):
    monkeypatch.setattr(pipeline, "gpu_names", lambda: ["GPU"] * here)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if known:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", known)
    parallel = ParallelConfig(num_processes=processes, num_machines=machines)
    assert pipeline.own_gpus(parallel) == seen


def test_notebooks_find_folders_that_are_named_from_here(monkeypatch):
    monkeypatch.setenv("UNMASK_MIRROR", "mirror")
    assert kernel_environment(Folders("smoke"))["UNMASK_MIRROR"] == str(Path.cwd() / "mirror")


def test_our_notebooks_name_earlier_ones_and_sections_and_processes_make_none_due():
    folders = Folders("smoke")
    for index, one in enumerate(notebooks := discover(folders.notebooks)):
        assert {*one.inputs} <= {*names(notebooks[:index])} and {*one.reads} <= {*Preset.__dataclass_fields__}
        assert one.seeds in ("each", "once", "pooled")
        assert one.path.read_text(encoding="utf8").count('"parameters"') == 1
    several = {"parallel.num_processes": 8, "parallel.num_machines": 2, "parallel.launcher": "srun torchrun"}
    one, two = (Pipeline(folders, load_preset("smoke", changed), {}).depends_on for changed in ({}, several))
    assert one == two
