"""The graph of notebooks: selection, and what makes a stage due."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from unmask.config import SECTIONS, ParallelConfig, load_preset, resolved
from unmask.run import Folders
from unmask.store import write_atomic
from unmask.study import pipeline
from unmask.study.pipeline import PipelineError, discover, expected, plan, select, why_due

PRESET = {"data": {"seed": 0}, "pair": {"steps": 10}}


@pytest.fixture
def diamond(checkout):
    """00 → {01, 02} → 03, and 04 apart."""
    checkout.notebook("00_backbone")
    checkout.notebook("01_left", needs=["00_backbone"], reads=["pair"])
    checkout.notebook("02_right", needs=["00_backbone"])
    checkout.notebook("03_join", needs=["01_left", "02_right"])
    checkout.notebook("04_apart")
    return checkout


def finish(names, marks, folders):
    """Marks stages as done, as their execution would."""
    for name in names:
        write_atomic(folders.executed / f"{name}.ipynb", "")
        write_atomic(folders.results / f"{name}.json", "{}")
        write_atomic(folders.artifacts / name / "done.json", json.dumps(marks[name] | {"saved": True}))


def marks_of(checkout, preset=PRESET, data=""):
    return expected(discover(checkout.folders.notebooks), preset, checkout.folders, data)


def reasons(checkout, preset=PRESET):
    stages, marks = discover(checkout.folders.notebooks), marks_of(checkout, preset)
    due = {stage.name: why_due(stage, marks[stage.name], checkout.folders) for stage in stages}
    return {name: why for name, why in due.items() if why}


def all_done(checkout):
    marks = marks_of(checkout)
    finish(list(marks), marks, checkout.folders)
    assert reasons(checkout) == {}


def test_other_data_are_due_where_they_are_read(diamond):
    one, two = (marks_of(diamond, data=data) for data in ("one", "another"))
    changed = [name for name in one if one[name]["depends_on"]["data"] != two[name]["depends_on"]["data"]]
    assert changed == ["00_backbone", "02_right", "03_join", "04_apart"]


def test_what_is_taken_is_not_missed(diamond):
    diamond.notebook("05_report", needs=["00_backbone"], takes=["03_join"])
    stages = discover(diamond.folders.notebooks)

    def inputs():
        return {key for key in marks_of(diamond)["05_report"]["depends_on"] if key.startswith("input")}

    finish(["00_backbone"], marks_of(diamond), diamond.folders)
    report = select(stages, only="05")
    assert list(plan(stages, report, marks_of(diamond), diamond.folders)) == report
    assert inputs() == {"input 00_backbone"}
    finish(["03_join"], marks_of(diamond), diamond.folders)
    assert inputs() == {"input 00_backbone", "input 03_join"}
    # What the report could not have yet makes it due with what brings it.
    (diamond.folders.artifacts / "03_join" / "done.json").unlink()
    finish(["01_left", "02_right", "04_apart", "05_report"], marks_of(diamond), diamond.folders)
    due = plan(stages, stages, marks_of(diamond), diamond.folders)
    told = {"03_join": "not done yet", "05_report": "input 03_join is new"}
    assert {one.name: why for one, why in due.items()} == told


def test_what_is_no_notebook_of_ours_is_refused(checkout):
    (checkout.folders.notebooks / "00_text.ipynb").write_text('{"cells": [], "metadata": {}}')
    with pytest.raises(PipelineError, match=r'00_text\.ipynb: add "unmask"'):
        discover(checkout.folders.notebooks)
    checkout.notebook("00_text", needs=["01_later"])
    with pytest.raises(PipelineError, match=r"00_text\.ipynb needs 01_later: no notebook before it"):
        discover(checkout.folders.notebooks)


def test_selection(diamond):
    (diamond.folders.notebooks / "01_left-Copy1.ipynb").touch()
    stages = discover(diamond.folders.notebooks)
    assert [one.name for one in stages] == ["00_backbone", "01_left", "02_right", "03_join", "04_apart"]
    for text in ("03", "03_join", "join", "03_join.ipynb"):
        assert select(stages, only=text) == stages[3:4]
    assert select(stages, only="03,01") == [stages[1], stages[3]]  # in running order
    assert select(stages, start="02") == stages[2:]
    assert select(stages, stop="right") == stages[:3]
    assert select(stages, start="02", stop="03") == stages[2:4]
    with pytest.raises(PipelineError, match="no notebook '03_joi'; did you mean '03_join'"):
        select(stages, only="03_joi")
    for none in ({"only": "01", "start": "00"}, {"start": "02", "stop": "01"}):
        with pytest.raises(PipelineError, match="no notebook is left"):
            select(stages, **none)


def test_what_changed_is_the_reason_and_concerns_those_who_depend_on_it(diamond):
    assert set(reasons(diamond).values()) == {"not done yet"}
    all_done(diamond)
    preset = PRESET | {"pair": {"steps": 11}, "merge": {"t": [0.5]}}
    after = {"03_join": "input 01_left changed"}
    assert reasons(diamond, preset) == {"01_left": "preset section pair changed"} | after
    diamond.notebook("01_left", ["x = 1"], needs=["00_backbone"], reads=["pair"])
    (diamond.folders.executed / "04_apart.ipynb").unlink()
    (diamond.folders.results / "02_right.json").unlink()
    after |= dict.fromkeys(("02_right", "04_apart"), "executed notebook or results are missing")
    assert reasons(diamond) == {"01_left": "notebook changed"} | after


def test_code_of_the_library_counts_and_comments_and_layout_do_not(diamond):
    library = diamond.folders.library
    assert library.is_relative_to(diamond.root), "this test writes into it"
    all_done(diamond)
    module = library / "run.py"
    source = module.read_text()
    (library / "cli.py").write_text("")
    code = source[source.index("\n\nimport") :].replace("\ndef ", "\ndef  ")
    module.write_text('"""Another docstring."""\n\n# and a comment' + code)
    assert reasons(diamond) == {}
    module.write_text(source + "\nx = 1\n")
    found = reasons(diamond)
    assert len(found) == 5 and all(why.endswith("library changed") for why in found.values())


def test_prose_and_what_a_reader_leaves_in_a_notebook_do_not_count(diamond):
    all_done(diamond)
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


def test_a_stage_made_from_an_old_input_stays_due(diamond):
    """`--only 03` with 01 out of date: the record names the input as it was."""
    all_done(diamond)
    changed = PRESET | {"pair": {"steps": 11}}
    stage = discover(diamond.folders.notebooks)[3]
    mark = marks_of(diamond, changed)["03_join"]
    pipeline._finish(pipeline._Child(stage, None, 0.0), mark, diamond.folders)
    assert reasons(diamond, changed)["03_join"] == "input 01_left changed"


def test_a_record_keeps_what_of_the_preset_was_otherwise_when_its_notebook_ran(diamond):
    about = {"commit": "abc", "dirty": False}
    for stage, steps in zip(discover(diamond.folders.notebooks)[:4], (11, 12, 11, 11), strict=True):
        preset = PRESET | {"pair": {"steps": steps, "seed": steps, "keep_tokens": steps}}
        ended = pipeline._Child(stage, SimpleNamespace(returncode=0), 0.0)
        mark = marks_of(diamond, preset)[stage.name]
        pipeline._record(ended, mark, about | {"preset": preset}, diamond.folders)
    kept = {name: one["otherwise"] for name, one in pipeline.recorded(diamond.folders).items()}
    old = {"pair.steps": 12}  # what is made from it, too
    assert kept == {"00_backbone": {}, "01_left": old, "02_right": {}, "03_join": old}


def test_what_pools_the_seeds_is_due_again_when_one_of_them_changes(diamond):
    diamond.notebook("05_report", needs=["01_left"], reads=[], seeds="pooled")
    diamond.notebook("06_aside", needs=["01_left"], reads=[], seeds="once")
    stages = discover(diamond.folders.notebooks)
    assert [stage.number for stage in select(stages, again=1)] == ["00", "01", "02", "03", "04"]
    all_done(diamond)
    other = Folders("smoke-seed1", root=diamond.root).results
    write_atomic(other / "02_right.json", '{"irrelevant": 1}')
    assert reasons(diamond) == {}
    for value in (1, 2):
        write_atomic(other / "01_left.json", json.dumps({"found": value}))
        assert reasons(diamond) == {"05_report": "run smoke-seed1 changed"}
        all_done(diamond)


def test_plan_keeps_the_order_and_refuses_missing_inputs(diamond):
    stages, marks, folders = discover(diamond.folders.notebooks), marks_of(diamond), diamond.folders
    assert list(plan(stages, stages, marks, folders)) == stages
    with pytest.raises(PipelineError, match="01_left needs the output of 00_backbone, which is not done"):
        plan(stages, select(stages, only="01"), marks, folders)
    finish(list(marks), marks, folders)
    assert plan(stages, stages, marks, folders) == {}
    assert plan(stages, stages[1:2], marks, folders, force=True) == {stages[1]: "forced"}


MACHINES = [
    (0, 2, 1, 2, r"2 GPUs are needed on this machine, and it has 0: .*parallel\.num_processes=2", 1),
    (4, 8, 1, None, "8 GPUs are needed on this machine, and it has 4: --gpus 4", 1),
    (8, 16, 2, None, "trainings on 2 machines need parallel.launcher", 1),
    ("0,1", 4, 1, None, "4 GPUs are needed on this machine, and it has 2", 1),
    (4, 2, 1, 2, "takes all of them: --jobs 1", 2),
    (0, 2, 1, None, "", 2),
    (0, 1, 1, 1, "", 2),
    (4, 4, 1, 4, "", 1),
]


@pytest.mark.parametrize(("here", "processes", "machines", "gpus", "message", "jobs"), MACHINES)
def test_a_machine_with_too_few_gpus_is_refused(monkeypatch, here, processes, machines, gpus, message, jobs):
    visible = here if isinstance(here, str) else ",".join(map(str, range(here)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(pipeline, "gpu_names", lambda: ["GPU"] * 8)
    parallel = ParallelConfig(num_processes=processes, num_machines=machines)
    preset = replace(load_preset("smoke"), parallel=parallel)
    if not message:
        return pipeline.check_machine(preset, gpus, jobs)
    with pytest.raises(PipelineError, match=message):
        pipeline.check_machine(preset, gpus, jobs)


def test_layers_are_compiled_only_where_something_compiles_c(monkeypatch):
    compiled = load_preset("gpu", {"diffusion.compile": True, "pair.compile": False})
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pipeline, "gpu_names", list)
    pipeline.check_machine(compiled, None, 1)
    monkeypatch.setattr(pipeline, "gpu_names", lambda: ["GPU"])
    pipeline.check_machine(load_preset("smoke"), None, 2)
    with pytest.raises(PipelineError, match=r"a C compiler and .*Python\.h.* --set diffusion\.compile=false"):
        pipeline.check_machine(compiled, None, 1)


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


def test_notebooks_find_folders_that_are_named_from_here(monkeypatch, tmp_path):
    monkeypatch.setenv("UNMASK_MIRROR", "mirror")
    assert pipeline._environment(Folders("smoke", tmp_path))["UNMASK_MIRROR"] == str(Path.cwd() / "mirror")


def test_our_notebooks_name_earlier_ones_and_sections_and_processes_make_none_due():
    folders = Folders("smoke")
    stages = discover(folders.notebooks)
    for index, stage in enumerate(stages):
        assert {*stage.inputs} <= {one.name for one in stages[:index]} and {*stage.reads} <= {*SECTIONS}
        assert stage.seeds in ("each", "once", "pooled")
        assert stage.path.read_text(encoding="utf8").count('"parameters"') == 1
    several = {"parallel.num_processes": 8, "parallel.num_machines": 2, "parallel.launcher": "srun torchrun"}
    presets = [resolved(load_preset("smoke", overrides)) for overrides in ({}, several)]
    one, two = (expected(stages, preset, folders) for preset in presets)
    assert one == two
