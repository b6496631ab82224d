import pytest

from unmask.store import artifacts_root, repository, write_atomic
from unmask_study import run as workspace
from unmask_study.run import Run


@pytest.fixture
def run(tmp_path, monkeypatch):
    opened = Run.open("02_pair", "smoke", {"pair.steps": 7}, run="mine")
    monkeypatch.setattr(workspace, "repository", lambda: tmp_path)
    return opened


@pytest.mark.parametrize("unset", [False, True])
def test_artifacts_lie_where_the_environment_says(tmp_path, monkeypatch, unset):
    monkeypatch.setenv("UNMASK_ARTIFACTS", "" if unset else str(tmp_path))
    assert artifacts_root() == (repository() / "artifacts" if unset else tmp_path.resolve())


def test_opening_a_run_changes_nothing_on_disk(tmp_path, capsys):
    done = write_atomic(tmp_path / "smoke" / "02_pair" / "done.json", "{}")
    Run.open("02_pair", "smoke", {"pair.steps": 7, "pair.lr": 0.5}, run="smoke")
    assert [*tmp_path.rglob("*")] == [done.parents[1], done.parent, done]
    assert "run 'smoke', pair.steps = 7, pair.lr = 0.5\n" in capsys.readouterr().out


def test_a_run_has_its_name_its_parameters_and_its_folders(run, tmp_path):
    assert (run.notebook, run.name, run.config.pair.steps) == ("02_pair", "mine", 7)
    assert run.folder("pair").parent == run.artifacts() == tmp_path / "mine" / "02_pair"
    assert run.artifacts().is_dir() and run.results == tmp_path / "results" / "mine"
    with pytest.raises(FileNotFoundError, match="`unmask run --preset smoke --run mine --to 01`"):
        run.artifacts("01_diffusion_cpt")


def test_by_hand_a_run_of_its_own_reads_the_presets(tmp_path, monkeypatch, capsys):
    run = Run.open("02_pair", "smoke")
    monkeypatch.setattr(workspace, "repository", lambda: tmp_path)
    assert run.artifacts() == tmp_path / "lab" / "smoke" / "02_pair"
    with pytest.raises(FileNotFoundError, match=r"`unmask run --preset smoke --to 01`.*--dry-run says"):
        run.artifacts("01_diffusion_cpt")
    for name, told in (("smoke", True), ("lab/smoke", False)):
        write_atomic(tmp_path / name / "01_diffusion_cpt" / "diffusion" / "config.json", "{}")
        write_atomic(tmp_path / "results" / name / "01_diffusion_cpt.json", f'{{"of": "{name}"}}')
        assert run.artifacts("01_diffusion_cpt") == tmp_path / name / "01_diffusion_cpt"
        assert ("taken from run 'smoke'" in capsys.readouterr().out) == told
        assert run.load("01_diffusion_cpt") == {"of": name}
    assert run.save({}).parent == tmp_path / "results" / "lab" / "smoke"


def test_metrics_are_saved_as_json_and_a_notebook_that_did_not_run_has_none(run):
    metrics = {"ndcg": 0.5, "language": "日本語"}
    assert run.save(metrics) == run.results / "02_pair.json"
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.save({"ndcg": float("nan")})
    assert (run.load("02_pair"), run.load("03_contextual")) == (metrics, {})
