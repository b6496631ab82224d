"""The graph of notebooks: what is refused at the start, order, selection, and what makes a stage due."""

from __future__ import annotations

import json

import pytest

from toy_checkout import Checkout
from unmask.config import SECTIONS, ParallelConfig, load_preset, resolved
from unmask.run import Folders
from unmask.study import pipeline
from unmask.study.pipeline import (
    PipelineError,
    Slot,
    Stage,
    clock,
    discover,
    expected,
    library_hash,
    plan,
    repeated,
    seal,
    select,
    slots,
    why_due,
)

PRESET = {"data": {"seed": 0}, "pair": {"steps": 10}}


@pytest.fixture
def diamond(checkout: Checkout) -> Checkout:
    """00 → {01, 02} → 03, and 04 apart."""
    checkout.notebook("00_backbone")
    checkout.notebook("01_left", needs=["00_backbone"], reads=["pair"])
    checkout.notebook("02_right", needs=["00_backbone"])
    checkout.notebook("03_join", needs=["01_left", "02_right"])
    checkout.notebook("04_apart")
    return checkout


def finish(stages: list[Stage], marks: dict, folders: Folders) -> None:
    """Marks stages as done, as their execution would."""
    for stage in stages:
        folders.executed.mkdir(parents=True, exist_ok=True)
        (folders.executed / f"{stage.name}.ipynb").touch()
        done = folders.artifacts / stage.name / "done.json"
        done.parent.mkdir(parents=True, exist_ok=True)
        done.write_text(json.dumps(marks[stage.name]))


def reasons(checkout: Checkout, preset: dict = PRESET) -> dict[str, str]:
    stages = discover(checkout.folders.notebooks)
    marks = expected(stages, preset, checkout.folders)
    due = {stage.name: why_due(stage, marks[stage.name], checkout.folders) for stage in stages}
    return {name: why for name, why in due.items() if why}


def all_done(checkout: Checkout) -> None:
    stages = discover(checkout.folders.notebooks)
    finish(stages, expected(stages, PRESET, checkout.folders), checkout.folders)
    assert reasons(checkout) == {}


def test_order_is_by_number_where_the_needs_allow_it(diamond: Checkout) -> None:
    names = [stage.name for stage in discover(diamond.folders.notebooks)]
    assert names == ["00_backbone", "01_left", "02_right", "03_join", "04_apart"]


def test_what_is_taken_is_not_missed(diamond: Checkout) -> None:
    metadata = {"unmask": {"needs": ["00_backbone"], "takes": ["03_join"], "reads": []}}
    diamond.notebook("05_report", metadata=metadata)
    stages = {stage.name: stage for stage in discover(diamond.folders.notebooks)}

    def inputs() -> set[str]:
        return set(expected(list(stages.values()), PRESET, diamond.folders)["05_report"]["inputs"])

    marks = expected(list(stages.values()), PRESET, diamond.folders)
    finish([stages["00_backbone"]], marks, diamond.folders)
    report = stages["05_report"]
    assert [task.stage for task in plan(list(stages.values()), [report], marks, diamond.folders)] == [report]
    assert inputs() == {"00_backbone"}
    finish([stages["03_join"]], marks, diamond.folders)
    assert inputs() == {"00_backbone", "03_join"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"needs": ["01_lef"]}, "'01_lef', which is no earlier notebook; did you mean '01_left'"),
        ({"needs": ["04_apart"]}, "'04_apart', which is no earlier notebook"),
        ({"reads": ["pairs"]}, "reads 'pairs', which is no section of a preset; did you mean 'pair'"),
        ({"parameters": None}, "one cell must be tagged 'parameters' and declare preset, overrides, run"),
        ({"parameters": 'preset: str = "cpu"'}, "one cell must be tagged 'parameters' and declare"),
        ({"metadata": {}}, "is no notebook that says what it needs and reads (KeyError('unmask'))"),
        ({"metadata": {"unmask": {"needs": [], "reads": [], "seeds": "all"}}}, "seeds 'all', which is not"),
    ],
)
def test_a_notebook_that_cannot_work_is_refused(diamond: Checkout, settings: dict, message: str) -> None:
    diamond.notebook("04_apart", **settings)
    with pytest.raises(PipelineError) as error:
        discover(diamond.folders.notebooks, PRESET)
    assert message in str(error.value)
    assert "04_apart" in str(error.value)


def test_what_is_no_notebook_is_refused(checkout: Checkout) -> None:
    with pytest.raises(PipelineError, match="no notebook named NN_"):
        discover(checkout.folders.notebooks)
    (checkout.folders.notebooks / "00_text.ipynb").write_text("hello")
    with pytest.raises(PipelineError, match=r"00_text\.ipynb is no notebook"):
        discover(checkout.folders.notebooks)


def test_selection(diamond: Checkout) -> None:
    stages = discover(diamond.folders.notebooks)
    assert [s.name for s in select(stages, start="02")] == ["02_right", "03_join", "04_apart"]
    for text in ("03", "03_join", "join", "03_join.ipynb"):
        assert [s.name for s in select(stages, only=text)] == ["03_join"]
    with pytest.raises(PipelineError, match="no notebook '03_joi'; did you mean '03_join'"):
        select(stages, only="03_joi")
    assert [s.name for s in select(stages, stop="right")] == [s.name for s in stages[:3]]
    assert [s.name for s in select(stages, start="02", stop="03")] == ["02_right", "03_join"]
    for both in ({"start": "00"}, {"stop": "03"}):
        with pytest.raises(PipelineError, match="exclude each other"):
            select(stages, only="01", **both)
    with pytest.raises(PipelineError, match="--to 01: 01_left comes before 02_right, where --from 02 begins"):
        select(stages, start="02", stop="01")


def test_what_changed_is_the_reason_and_concerns_those_who_depend_on_it(diamond: Checkout) -> None:
    assert set(reasons(diamond).values()) == {"never ran"}
    all_done(diamond)
    assert reasons(diamond, PRESET | {"pair": {"steps": 11}, "merge": {"t": [0.5]}}) == {
        "01_left": "preset section pair changed",
        "03_join": "input 01_left changed",
    }
    diamond.notebook("01_left", ["x = 1"], needs=["00_backbone"], reads=["pair"])
    (diamond.folders.executed / "04_apart.ipynb").unlink()
    assert reasons(diamond) == {
        "01_left": "notebook changed",
        "03_join": "input 01_left changed",
        "04_apart": "executed notebook is missing",
    }


def test_changed_code_of_the_library_concerns_all(diamond: Checkout) -> None:
    library = diamond.folders.library
    assert library.is_relative_to(diamond.root), "this test writes into it"
    before = library_hash(library)

    def changed() -> bool:
        library_hash.cache_clear()
        return library_hash(library) != before

    (library / "cli.py").write_text("")
    (library / "study" / "pipeline.py").write_text("")
    module = library / "run.py"
    source = module.read_text()
    module.write_text(
        '"""Another docstring."""\n\n# and a comment' + source[source.index("\n\nfrom __future__") :]
    )
    assert not changed()
    module.write_text(source + "\nx = 1\n")
    assert changed()


def test_a_changed_library_is_given_as_the_reason_and_other_prose_is_none(diamond: Checkout) -> None:
    all_done(diamond)
    diamond.notebook("04_apart", prose="# A better question")
    assert reasons(diamond) == {}
    done = diamond.folders.artifacts / "04_apart" / "done.json"
    mark = json.loads(done.read_text())
    mark |= {"library": "another", "versions": mark["versions"] | {"torch": "2.12.0"}}
    done.write_text(json.dumps(seal(mark)))
    assert reasons(diamond) == {"04_apart": "library changed, torch is another version"}


def test_what_a_reader_leaves_in_a_notebook_does_not_count(diamond: Checkout) -> None:
    all_done(diamond)
    path = diamond.folders.notebooks / "01_left.ipynb"
    document = json.loads(path.read_text())
    for cell in document["cells"]:
        cell["metadata"]["execution"] = {"iopub.status.busy": "2026-01-01T00:00:00Z"}
        cell["source"] = cell["source"].splitlines(keepends=True)
        if cell["cell_type"] == "code":
            cell["execution_count"] = 7
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "hello"}]
    document["metadata"] |= {"kernelspec": {"name": "other"}, "language_info": {"version": "3.12.1"}}
    path.write_text(json.dumps(document))
    assert reasons(diamond) == {}


def test_a_stage_made_from_an_old_input_stays_due(diamond: Checkout) -> None:
    """`--only 03` with 01 out of date: the record names the input as it was."""
    all_done(diamond)
    old = diamond.folders.done("01_left")["hash"]
    stages = discover(diamond.folders.notebooks)
    marks = expected(stages, PRESET | {"pair": {"steps": 11}}, diamond.folders)
    assert marks["01_left"]["hash"] != old
    mark = marks["03_join"]
    done = diamond.folders.artifacts / "03_join" / "done.json"
    done.write_text(json.dumps(seal(mark | {"inputs": mark["inputs"] | {"01_left": old}})))
    assert reasons(diamond, PRESET | {"pair": {"steps": 11}})["03_join"] == "input 01_left changed"


def test_what_pools_the_seeds_is_due_again_when_one_of_them_changes(diamond: Checkout) -> None:
    pooled = {"needs": ["01_left"], "reads": [], "seeds": "pooled"}
    once = {"needs": ["01_left"], "reads": [], "seeds": "once"}
    diamond.notebook("05_report", metadata={"unmask": pooled})
    diamond.notebook("06_aside", metadata={"unmask": once})
    stages = discover(diamond.folders.notebooks)
    assert [stage.number for stage in repeated(stages)] == ["00", "01", "02", "03", "04"]
    all_done(diamond)
    other = Folders.of("smoke-seed1", root=diamond.root)
    finish(stages[2:3], {"02_right": {"hash": "irrelevant"}}, other)
    assert reasons(diamond) == {}
    for value in ("one", "another"):
        finish(stages[1:2], {"01_left": {"hash": value}}, other)
        assert reasons(diamond) == {"05_report": "run smoke-seed1 changed"}
        all_done(diamond)


def test_plan_keeps_the_order_and_refuses_missing_inputs(diamond: Checkout) -> None:
    stages = discover(diamond.folders.notebooks)
    marks = expected(stages, PRESET, diamond.folders)
    due = plan(stages, stages, marks, diamond.folders)
    assert [task.stage.name for task in due] == [stage.name for stage in stages]
    with pytest.raises(PipelineError, match="01_left needs the output of 00_backbone, which never ran"):
        plan(stages, select(stages, only="01"), marks, diamond.folders)
    finish(stages, marks, diamond.folders)
    assert plan(stages, stages, marks, diamond.folders) == []
    forced = plan(stages, select(stages, only="01"), marks, diamond.folders, force=True)
    assert [(task.stage.name, task.why) for task in forced] == [("01_left", "forced")]


def share(processes: int, machines: int = 1, launcher: str = "", **options) -> list[Slot]:
    """`slots` with the options' defaults."""
    parallel = ParallelConfig(num_processes=processes, num_machines=machines, launcher=launcher)
    return slots(parallel, **{"gpus": None, "jobs": 1} | options)


def fake_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(pipeline, "visible_gpus", lambda: [str(index) for index in range(count)])


@pytest.mark.parametrize(
    ("gpus", "jobs", "here", "devices", "processes"),
    [
        (8, 2, 8, ["0,1,2,3", "4,5,6,7"], 4),
        (8, 3, 8, ["0,1", "2,3", "4,5"], 2),
        (None, 2, 8, ["0,1,2,3", "4,5,6,7"], 1),  # the preset's one process each
        (2, 3, 2, ["0", "1"], 1),  # no more notebooks at once than GPUs
    ],
)
def test_notebooks_side_by_side_have_disjoint_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int | None, jobs: int, here: int, devices: list, processes: int
) -> None:
    fake_gpus(monkeypatch, here)
    assert share(gpus or 1, gpus=gpus, jobs=jobs) == [
        Slot({"CUDA_VISIBLE_DEVICES": names}, {"parallel.num_processes": processes}) for names in devices
    ]
    assert share(8, gpus=8) if here == 8 else share(1, jobs=1) == [Slot()]  # alone it has all of them


@pytest.mark.parametrize(
    ("here", "processes", "machines", "options", "message"),
    [
        (0, 2, 1, {"gpus": 2}, "this machine has no GPU; --set parallel.num_processes=2 trains with two"),
        (4, 8, 1, {"gpus": 8}, "8 GPUs are needed on this machine, and it has 4: --gpus 4 uses all"),
        (
            4,
            16,
            2,
            {"launcher": "srun torchrun"},
            "8 GPUs are needed on this machine, and it has 4: --gpus 8",
        ),
        (8, 16, 2, {}, "trainings on 2 machines need parallel.launcher"),
        (8, 16, 2, {"jobs": 2, "launcher": "srun torchrun"}, "--jobs 2: what parallel.launcher starts needs"),
    ],
)
def test_what_cannot_work_here_is_refused(
    monkeypatch: pytest.MonkeyPatch, here: int, processes: int, machines: int, options: dict, message: str
) -> None:
    fake_gpus(monkeypatch, here)
    with pytest.raises(PipelineError) as error:
        share(processes, machines, **options)
    assert message in str(error.value)


def test_more_processes_make_no_stage_due_again() -> None:
    folders = Folders.of("smoke")
    stages = discover(folders.notebooks, SECTIONS)
    several = {"parallel.num_processes": 8, "parallel.num_machines": 2, "parallel.launcher": "srun torchrun"}
    presets = [resolved(load_preset("smoke", overrides)) for overrides in ({}, several)]
    one, two = (expected(stages, preset, folders) for preset in presets)
    assert one == two


def test_clock() -> None:
    assert [clock(s) for s in (59.6, 130, 3600, 36061)] == ["01:00", "02:10", "1:00:00", "10:01:01"]
