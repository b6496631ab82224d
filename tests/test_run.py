import os

import pytest

from unmask import run as workspace
from unmask.config import ConfigError
from unmask.models.pretrained import require_checkpoint
from unmask.run import Run
from unmask.store import artifacts_root, repository, write_atomic


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path / "artifacts"))
    opened = Run.open("02_pair", "smoke", {"pair.steps": 7}, run="mine")
    monkeypatch.setattr(workspace, "repository", lambda: tmp_path)
    return opened


def test_artifacts_lie_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path))
    assert artifacts_root() == tmp_path.resolve()
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("UNMASK_ARTIFACTS")
        else:
            monkeypatch.setenv("UNMASK_ARTIFACTS", unset)
        assert artifacts_root() == repository() / "artifacts"
    assert (repository() / "pyproject.toml").is_file()


def test_a_written_file_is_whole_and_alone(tmp_path):
    path = write_atomic(tmp_path / "new" / "a.json", "eins: ä\n")
    assert write_atomic(path, "zwei: ö\n") == path
    assert path.read_text(encoding="utf8") == "zwei: ö\n"
    assert [p.name for p in path.parent.iterdir()] == ["a.json"]


@pytest.mark.parametrize("failing", ["write", "rename"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, failing):
    path = write_atomic(tmp_path / "a.json", "old")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(*((type(path), "write_text") if failing == "write" else (os, "replace")), full)
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_values_changed_by_hand_are_said_and_make_the_notebook_due_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("UNMASK_ARTIFACTS", str(tmp_path))
    done = tmp_path / "smoke" / "02_pair" / "done.json"
    write_atomic(done, "{}")
    Run.open("02_pair", "smoke")
    assert done.is_file()
    assert "pair.steps" not in capsys.readouterr().out
    Run.open("02_pair", "smoke", {"pair.steps": 7, "pair.lr": 0.5})
    assert not done.is_file()
    said = capsys.readouterr().out
    assert "run 'smoke', pair.steps = 7, pair.lr = 0.5\n" in said
    assert str(done.parent) in said and str(repository() / "results" / "smoke") in said


def test_a_run_has_its_name_its_parameters_and_its_folders(run, tmp_path):
    assert (run.stage, run.name, run.config.pair.steps) == ("02_pair", "mine", 7)
    assert Run.open("02_pair", "smoke").name == "smoke"
    assert run.artifacts() == tmp_path / "artifacts" / "mine" / "02_pair"
    assert run.artifacts().is_dir()
    assert run.results == tmp_path / "results" / "mine"
    with pytest.raises(ConfigError, match="did you mean"):
        Run.open("02_pair", "smoke", {"pair.stepz": 7})


def test_an_earlier_stage_that_did_not_run_is_named_with_the_command_that_runs_it(run):
    with pytest.raises(FileNotFoundError) as error:
        run.artifacts("01_diffusion_cpt")
    message = str(error.value)
    assert message.startswith("02_pair needs the output of 01_diffusion_cpt")
    for part in ("unmask run", "--preset smoke", "--to 01", "--run mine"):
        assert part in message
    folder = run.artifacts().parent / "01_diffusion_cpt"
    folder.mkdir()
    assert run.artifacts("01_diffusion_cpt") == folder


def test_metrics_are_saved_as_json_and_a_stage_that_did_not_run_has_none(run):
    path = run.save({"ndcg": 0.5, "language": "日本語"})
    assert path == run.results / "02_pair.json"
    assert "日本語" in path.read_text(encoding="utf8")
    assert run.load("02_pair") == {"ndcg": 0.5, "language": "日本語"}
    assert run.load("03_contextual") is None
    assert run.save({"a": 1}, "claims").name == "claims.json"
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.save({"ndcg": float("nan")})
    assert run.load("02_pair")["ndcg"] == 0.5


def test_a_hub_name_is_found_in_the_mirror(tmp_path, monkeypatch):
    folder = tmp_path / "org" / "model"
    folder.mkdir(parents=True)
    monkeypatch.delenv("UNMASK_MIRROR", raising=False)
    assert require_checkpoint("org/model") == "org/model"
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path))
    assert require_checkpoint("org/other") == "org/other"
    with pytest.raises(ValueError, match="is no checkpoint"):
        require_checkpoint("org/model")
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    assert require_checkpoint("org/model") == str(folder)
