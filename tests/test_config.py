import dataclasses

import pytest

from unmask import config
from unmask.config import PRESETS, TRAINED, ConfigError, preset_names, resolved
from unmask_study.settings import Preset, load_preset


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_survives_a_round_trip_and_the_library_reads_of_it_what_trains(name):
    preset = load_preset(name)
    assert Preset(**resolved(preset)) == preset
    values, whole = resolved(config.load_preset(name)), resolved(preset)
    assert values.keys() < whole.keys() and not {"retrieval", "evaluation"} & values.keys()
    for section, value in values.items():
        assert value == whole[section] or value.items() <= whole[section].items()
    assert "batch_sizes" in whole["cde"] and "batch_sizes" not in values["cde"]


def test_overrides_replace_one_value_and_keep_the_others():
    before, after = load_preset("smoke"), load_preset("smoke", {"pair.lr": "1e-3"})
    assert after.pair.lr == 1e-3 and dataclasses.replace(after, pair=before.pair) == before
    without_plateau = {"pair.schedule": "cosine", "pair.decay": 10_000}  # so a decay needs no room
    assert load_preset("smoke", without_plateau).pair.decay == 10_000
    data = load_preset("smoke", {"data.source": "papermill_runs/sources/own.yaml"}).data
    assert data.source == str(PRESETS.parent / "sources" / "own.yaml")


def test_section_training_is_for_every_stage_that_has_the_key_and_does_not_set_it():
    changes = {"training.seed": 7, "training.query_length": 9, "pair.seed": 8}
    before, after = (resolved(load_preset("smoke", overrides)) for overrides in ({}, changes))
    seeds = {key: values["seed"] for key, values in after.items() if "seed" in values}
    of_data = {key: before[key]["seed"] for key in ("data", "synthesis")}
    assert seeds == dict.fromkeys(TRAINED, 7) | {"pair": 8} | of_data and len(seeds) == 10
    lengths = {key: values["query_length"] for key, values in after.items() if "query_length" in values}
    assert lengths.pop("evaluation") == before["evaluation"]["query_length"]
    assert set(lengths.values()) == {9} and "ar" not in lengths


def test_a_preset_says_of_all_stages_what_its_base_says_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "PRESETS", tmp_path)
    base = (PRESETS / "scratch.yaml").read_text().replace("pair: &pair", "pair: &pair\n  beta1: 0.5")
    (tmp_path / "base.yaml").write_text(base)
    (tmp_path / "mine.yaml").write_text("extends: base\ntraining: {beta1: 0.7}\nar: {beta1: 0.6}")
    assert (load_preset("base").pair.beta1, load_preset("base").cde.beta1) == (0.5, 0.5)
    beta1 = {stage: getattr(load_preset("mine"), stage).beta1 for stage in TRAINED}
    assert beta1 == dict.fromkeys(TRAINED, 0.7) | {"ar": 0.6}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"pairs.steps": 1}, "preset smoke: pairs: unknown key 'pairs'; did you mean 'pair'"),
        ({"pair.stps": 1}, "pair.stps: unknown key 'stps'; did you mean 'steps'"),
        ({"training.sed": 1}, "training.sed: unknown key 'sed'; did you mean 'seed'"),
        ({"retrieval.logs": 1}, "retrieval.logs: unknown key 'logs'; did you mean 'log'"),
        ({"steps": 1}, "write section.key"),
        ({"pair.steps": 0}, "pair.steps must be greater than or equal to 1, got 0"),
        ({"merge.t": []}, "merge.t must have at least 1 item, not 0, got"),
        ({"pair.lr": float("nan")}, "pair.lr must be a finite number"),
        ({"pair.pooling": "max"}, "pair.pooling must be 'mean' or 'last', got 'max'"),
        ({"pair.warmup": 10_000}, r"pair: warmup \+ decay exceed steps"),
        ({"pair.curriculum": [0, 0, 0]}, "curriculum gives no step to any"),
        ({"pair.shares": [0.05, 0.9, 0.05, 0]}, "reads more of its first languages than shares"),
        ({"diffusion.t_max": 0}, "t_min 0.001 lies above t_max 0.0: no token can be masked"),
        ({"backbone.heads": 7, "backbone.kv_heads": 2}, "7 heads cannot share 2 kv_heads evenly"),
        ({"quantization.shapes": [[32, 1]]}, "missing quantization.shapes.1"),
        ({"data.families": ["english", "codes"]}, "families.1 must be .*'code'.*, got 'codes'"),
        (
            {"contextual.chunk_length": 900},
            "document_length is 9009, the model has .* lower it, or chunks",
        ),
        ({"parallel.num_processes": 3, "parallel.num_machines": 2}, "cannot be shared evenly"),
    ],
)
def test_a_wrong_key_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_preset("smoke", overrides)


@pytest.mark.parametrize(
    "text", ["- pair", "pair", "[]", "pair: 3", "training: 3", "study: 3", "extends: yours"]
)
def test_a_preset_without_sections_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.setattr("unmask.config.PRESETS", tmp_path)
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"mine|yours"):
        load_preset("mine")


def test_the_study_of_batches_crosses_sizes_and_filters_and_encoders():
    sizes = {"batch_sizes": [32, 128], "cluster_sizes": [16], "batch": 64, "cluster_size": 16}
    changes = {f"cde.{key}": value for key, value in sizes.items()} | {"cde.filter_margin": 0.1}
    cde = load_preset("smoke", changes).cde
    rows = {name: tuple(row.values()) for name, row in cde.trainings.items()}
    assert len(rows) == 2 * 2 * 2 + 4
    assert rows["b32-crandom"] == (32, 0, -1.0, 0) and rows["b128-c16-filtered"] == (128, 16, 0.1, 0)
    assert rows["plain"] == (64, 16, 0.1, 0) and rows["context-random"] == (64, 0, 0.1, 4)
    repeated = load_preset("smoke", {"cde.filter_margin": -1.0, "cde.batch_sizes": [8, 16]}).cde
    assert not {"plain", "plain-random"} & repeated.trainings.keys()
    assert {*load_preset("smoke", changes | {"cde.studies": []}).cde.trainings} == {"plain", "context"}
    assert {"context", "context-random"} < repeated.trainings.keys()
