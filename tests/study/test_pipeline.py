"""The graph of notebooks: selection, what makes a notebook due, and its record."""

import json
import os
from contextlib import nullcontext

import pytest

from unmask.config import ParallelConfig
from unmask.store import read_json, write_atomic
from unmask_study import pipeline, runner
from unmask_study.pipeline import Pipeline, discover
from unmask_study.run import Folders
from unmask_study.settings import Preset, load_preset


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


def finish(checkout):
    """Marks all notebooks as done, as their execution would."""
    made = opened(checkout)
    for one in made.notebooks:
        write_atomic(checkout.folders.executed / f"{one.name}.ipynb", "")
        write_atomic(checkout.folders.results / f"{one.name}.json", "{}")
        made.finish(one)


def record(made, notebook, **ran):
    """Records that a notebook ran; the records then."""
    made.record(notebook, {"exit_status": 0, "wall_seconds": 40.0} | ran, made.describe("unmask run"))
    return read_json(made.folders.results / "provenance.json")["stages"]


def reasons(checkout, overrides=None):
    """Why notebooks are due."""
    made = opened(checkout, overrides)
    return {one.name: why for one in made.notebooks if (why := made.why_due(one))}


def due(checkout, only=None, **options):
    made = opened(checkout)
    return {one.name: why for one, why in made.due(made.select(only=only), **options).items()}


def names(notebooks):
    return [one.name for one in notebooks]


def parts(made):
    return {one.name: made.depends_on(one) for one in made.notebooks}


def changed(before, now):
    return [name[:2] for name in now if now[name] != before[name]]


def test_other_data_are_due_where_they_are_read(diamond):
    one, two = (opened(diamond, data=data) for data in ("one", "another"))
    assert changed(parts(one), parts(two)) == ["00", "01", "02", "03", "04"]
    assert parts(one)["01_left"]["data"] == parts(two)["01_left"]["data"]  # but its input has


def test_a_model_that_is_replaced_at_its_path_counts(diamond):
    weights = diamond.root / "base" / "model.safetensors"
    write_atomic(weights, "old weights" * 10**5)
    at = {"backbone.checkpoint": "base", "retrieval.pool": ["bm25", str(weights.parent)]}
    diamond.notebook("05_more", reads=["backbone"])
    diamond.notebook("06_search", reads=["retrieval"])
    before = parts(opened(diamond, at))
    write_atomic(weights, "new weights" * 10**5)
    assert changed(before, parts(opened(diamond, at))) == ["05", "06"]
    write_atomic(weights.with_name("config.json"), "one")
    before = parts(opened(diamond, at))
    os.utime(weights.with_name("config.json"))  # copied again
    assert parts(opened(diamond, at)) == before


SELECTED = {
    "several, in running order": ({"only": "03_join,01"}, ["01_left", "03_join"]),
    "from": ({"start": "02"}, ["02_right", "03_join", "04_apart"]),
    "to": ({"stop": "02"}, ["00_backbone", "01_left", "02_right"]),
    "from and to": ({"start": "02", "stop": "03"}, ["02_right", "03_join"]),
    "unknown": ({"only": "03_joi"}, "no notebook '03_joi'; did you mean '03_join'"),
    "only and from": ({"only": "01", "start": "00"}, "no notebook is left"),
    "to before from": ({"start": "02", "stop": "01"}, "no notebook is left"),
}


@pytest.mark.parametrize(("options", "expected"), SELECTED.values(), ids=SELECTED)
def test_selection(diamond, options, expected):
    """Of notebooks that say what they depend on, without JupyterLab's copies."""
    (diamond.folders.notebooks / "01_left-Copy1.ipynb").touch()
    (diamond.folders.notebooks / "09_own.ipynb").write_text('{"cells": [], "metadata": {}}')
    with pytest.raises(ValueError, match=expected) if isinstance(expected, str) else nullcontext():
        assert names(opened(diamond).select(**options)) == expected


def test_what_changed_is_the_reason_and_concerns_those_who_depend_on_it(diamond):
    assert set(reasons(diamond).values()) == {"not done yet"}
    finish(diamond)
    assert reasons(diamond) == {}
    after = {"03_join": "input 01_left changed"}
    because = {"01_left": "preset section pair changed"} | after
    assert reasons(diamond, {"pair.steps": 11, "merge.t": [0.4]}) == because
    diamond.notebook("01_left", ["x = 1"], needs=["00_backbone"], reads=["pair"])
    (diamond.folders.executed / "00_backbone.ipynb").unlink()
    (diamond.folders.results / "02_right.json").unlink()
    write_atomic(diamond.folders.results / "04_apart.json", '{"by": "other artifacts"}')
    others = "executed notebook or results are missing, or others'"
    after |= dict.fromkeys(("00_backbone", "02_right", "04_apart"), others)
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
    assert [why.endswith("library changed") for why in reasons(diamond).values()] == [True] * 5


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
    """`--only 03` with 01 out of date: done.json names the input as it was."""
    finish(diamond)
    made = opened(diamond, {"pair.steps": 11})
    made.finish(made.select(only="03")[0])
    assert reasons(diamond, {"pair.steps": 11})["03_join"] == "input 01_left changed"


def test_records_hold_for_these_values_and_data_alone(diamond):
    """What is made from another's record is none, either."""

    def records(steps, data, numbers):
        made = opened(diamond, {f"pair.{key}": steps for key in ("steps", "seed", "keep_tokens")}, data)
        *_, stages = (record(made, notebook) for notebook in made.select(only=numbers))
        return " ".join(name[:2] for name in stages)

    assert records(11, "one", "00,01,02,03") == "00 01 02 03"
    assert records(12, "one", "04") == records(12, "one", "03") == "00 02 04"
    assert records(12, "one", "01,03") == "00 01 02 03 04"
    assert records(12, "another", "00") == "00 01"  # which reads no data


def test_a_whole_time_is_that_of_a_run_from_nothing(diamond):
    """Later runs find its trainings, or go on with them."""
    whole = []
    for seed, took, status in ((1, 90, 0), (1, 11, 0), (5, 20, 75), (5, 9, 1), (5, 11, 0)):
        made = opened(diamond, {"data.seed": seed})
        stages = record(made, made.notebooks[0], wall_seconds=took, exit_status=status)
        whole.append(stages["00_backbone"]["whole_seconds"])
    assert whole == [90, 90, 20, 29, 40]


def test_a_time_is_that_of_such_a_processor_and_these_values(diamond, monkeypatch):
    here = pipeline.hardware()
    made = opened(diamond)
    for one in made.notebooks[:2]:
        record(made, one, wall_seconds=341.0)
    others = {"pair.seed": 3, "diffusion.steps": 30}  # of other notebooks, or as long
    cases = [({}, others, True), ({}, {"pair.steps": 3}, False), ({"cores": 640}, {}, False)]
    for there, changes, known in cases:
        monkeypatch.setattr(pipeline, "hardware", lambda there=there: here | there)
        seconds, estimated = opened(diamond, changes).times()
        assert (seconds["01_left"] == 341.0) is known is ("01_left" not in estimated)


def test_what_pools_the_seeds_comes_last_and_is_due_when_one_of_them_changes(diamond):
    diamond.notebook("05_report", needs=["01_left"], reads=[], seeds="pooled")
    diamond.notebook("06_aside", needs=["01_left"], reads=[], seeds="once")
    assert [one.name[:2] for one in opened(diamond).select(again=1)] == ["00", "01", "02", "03", "04"]
    finish(diamond)
    (diamond.folders.artifacts / "03_join" / "done.json").unlink()
    assert due(diamond) == {"03_join": "not done yet", "05_report": "pools 03_join"}
    finish(diamond)
    other = Folders("smoke-seed1").results
    for value in (1, 2):
        write_atomic(other / "01_left.json", json.dumps({"ndcg": value}))
        assert reasons(diamond) == {"05_report": "run smoke-seed1 changed"}
        finish(diamond)
    write_atomic(other / "scores" / "01_left.parquet", "copied later")
    write_atomic(diamond.folders.results / "scores" / "01_left.parquet", "new")
    assert reasons(diamond) == {"05_report": "run smoke changed, run smoke-seed1 changed"}


def test_due_notebooks_are_in_order_and_missing_inputs_refused(diamond):
    assert list(due(diamond)) == names(opened(diamond).notebooks)
    with pytest.raises(ValueError, match="01_left needs the output of 00_backbone, which is not done"):
        due(diamond, only="01")
    finish(diamond)
    assert due(diamond) == {}
    assert due(diamond, only="01", force=True) == {"01_left": "forced"}


MACHINES = {  # CUDA_VISIBLE_DEVICES, processes, machines, --gpus, --jobs
    "no GPU": (("", 2, 1, 2, 1), r"2 GPUs are needed on this machine, and it has 0: .*num_processes=2"),
    "too few GPUs": (("0,1", 8, 1, None, 1), "8 GPUs are needed on this machine, and it has 2: --gpus 2"),
    "no launcher": (("0,1", 16, 2, None, 1), "trainings on 2 machines need parallel.launcher"),
    "side by side": (("0,1", 2, 1, 2, 2), "takes all of them: --jobs 1"),
    "processes on CPUs": (("", 2, 1, None, 2), ""),
    "one, on the CPU": (("", 1, 1, 1, 2), ""),
    "all GPUs": (("0,1", 2, 1, 2, 1), ""),
}


@pytest.mark.parametrize(("machine", "refused"), MACHINES.values(), ids=MACHINES)
def test_a_machine_that_cannot_is_refused(monkeypatch, machine, refused):
    visible, processes, machines, gpus, jobs = machine
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(runner, "gpu_names", lambda: ["GPU"] * 8)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    parallel = ParallelConfig(num_processes=processes, num_machines=machines)
    with pytest.raises(ValueError, match=refused) if refused else nullcontext():
        runner.check_machine(parallel, gpus, jobs)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)  # its build, or an old driver
    if visible and not refused:
        with pytest.raises(ValueError, match=r"nvidia-smi lists \d GPUs, PyTorch .* can use 0: install"):
            runner.check_machine(parallel, gpus, jobs)


SEEN = [  # CUDA_VISIBLE_DEVICES, GPUs, processes, place, --jobs, and what a notebook sees
    ("0,1,2,3,4,5,6,7", 8, 2, 0, 1, "0,1"),
    ("3,5,7", 8, 2, 0, 1, "3,5"),
    ("0,1", 2, 2, 0, 1, None),
    ("-1", 2, 1, 0, 1, None),
    ("3,5,7", 8, 1, 1, 2, "5"),  # side by side
    ("0", 1, 1, 1, 2, "0"),
    ("", 0, 1, 1, 2, None),
]


@pytest.mark.parametrize(("visible", "here", "processes", "place", "jobs", "seen"), SEEN)
def test_notebooks_see_the_gpus_that_are_theirs(monkeypatch, visible, here, processes, place, jobs, seen):
    monkeypatch.setattr(runner, "gpu_names", lambda: ["GPU"] * here)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    variables = runner.gpus(ParallelConfig(num_processes=processes), place, jobs)
    assert variables.get("CUDA_VISIBLE_DEVICES") == seen


def test_our_notebooks_name_earlier_ones_and_sections_and_processes_make_none_due():
    folders = Folders("smoke")
    for index, one in enumerate(notebooks := discover(folders.notebooks)):
        assert {*one.after, *one.needs} <= {*names(notebooks[:index])}
        assert {*one.reads} <= {*Preset.__dataclass_fields__}
        assert one.seeds in ("each", "once", "pooled")
        assert one.path.read_text(encoding="utf8").count('"parameters"') == 1
    several = {"parallel.num_processes": 8, "parallel.num_machines": 2, "parallel.launcher": "srun torchrun"}
    one, two = (parts(Pipeline(folders, load_preset("smoke", values), {})) for values in ({}, several))
    assert one == two
