"""Effects against naive loops, gates, scores kept, and claims computed from them over seeds."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from unmask.config import resolved
from unmask.evaluation.tasks import Task
from unmask.store import write_json
from unmask_study import evidence
from unmask_study.run import Run, seed_run
from unmask_study.settings import load_preset

RNG = np.random.default_rng(4)
WORKS = {"claim": "It works.", "short": "works", "source": "table 1", "paper": "+3", "notebook": "02_pair"}
WORKS |= {"ours": "new", "other": ["old"], "contextual": False, "rests": {"02_pair": ["pair"]}}
WORKS |= {"bar": 0.0, "pretrained": False, "group": "paper"}
CLAIMS = {"works": WORKS, "big": WORKS | {"pretrained": True}, "chunks": WORKS | {"contextual": True}}
CLAIMS |= {"better": WORKS | {"other": ["old", "older"]}, "sized": WORKS | {"ours": "huge"}}
DOCUMENTS = [["a"], ["b"], ["c"], ["d"], ["e"]]
TASK = Task("t", "english", [str(i) for i in range(40)], DOCUMENTS, [{i % 5} for i in range(40)])


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Notebook 12 of the run "smoke" with other claims, in an empty checkout."""
    monkeypatch.setattr("unmask_study.run.repository", lambda: tmp_path)
    monkeypatch.setattr(evidence, "stated", lambda: CLAIMS)
    return Run("12_report", "smoke", load_preset("smoke"))


# Effects


def test_an_effect_is_the_mean_over_tasks_with_documents_drawn_within_them():
    """Against a bootstrap that draws documents, each with all of its queries, within each task."""
    documents = {"one": RNG.integers(0, 80, 300), "two": RNG.integers(0, 60, 200)}
    gain = {t: RNG.normal(0.1, 0.3, len(d)) + RNG.normal(0, 0.3, 80)[d] for t, d in documents.items()}
    found = evidence.effect([gain], documents)
    assert found.value == pytest.approx(np.mean([x_N.mean() for x_N in gain.values()]))

    def resampled_mean(gain_N, document_N):
        names = np.unique(document_N)
        rows = [np.flatnonzero(document_N == name) for name in RNG.choice(names, len(names))]
        return gain_N[np.concatenate(rows)].mean()

    drawn = [np.mean([resampled_mean(gain[t], documents[t]) for t in gain]) for _ in range(2000)]
    assert (found.high - found.low) / 2 == pytest.approx(1.98 * np.std(drawn), rel=0.08)


@pytest.mark.parametrize("gain_N", [[0.0, 1, 1], [0.5] * 300, [0.5]])
def test_one_document_tells_nothing_of_others(gain_N):
    """However many queries ask for it: gains of a metric in [0, 1] have a standard deviation of 1 at most.
    Beside a task that is sure, its half of the effect stays unknown."""
    gains, documents = {"t": np.array(gain_N)}, {"t": [7] * len(gain_N)}
    alone = evidence.effect([gains], documents)
    both = evidence.effect([gains | {"sure": np.ones(9)}], documents | {"sure": range(9)})
    widths = [alone.high - alone.value, 2 * (both.high - both.value)]
    assert widths == pytest.approx([stats.t.ppf(0.975, 1)] * 2, rel=0.01)
    assert alone.value == pytest.approx(np.mean(gain_N))
    assert evidence.judge(alone, 0.0, seeds=3) == "open"


def test_compare_takes_the_documents_that_queries_ask_for():
    task = Task("t", "contextual", [*"abcd"], [["a", "b"], ["c", "d"]], [{3}, {0, 1}, {2}, {1, 2}])
    assert task.document_N.tolist() == [1, 0, 1, 0]
    ours, other = {"t": np.arange(4.0)}, {"t": np.ones(4)}
    expected = evidence.effect([{"t": ours["t"] - 1}], {"t": [1, 0, 1, 0]})
    assert evidence.compare(ours, other, [task]) == expected


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0])  # of the seeds, in standard errors of one seed's queries
def test_intervals_over_seeds_hold_the_truth(spread):
    """Documents, seeds, and each document in each seed have effects of their own; the truth is 0."""
    rng, trials, n, seeds, held = np.random.default_rng(0), 200, 100, 3, 0
    for _ in range(trials):
        values_SN = rng.standard_normal((seeds, 1)) * spread / n**0.5 + rng.standard_normal((seeds, n)) / 2
        values_SN += rng.standard_normal(n)
        found = evidence.effect([{"t": values_N} for values_N in values_SN], {"t": np.arange(n)})
        held += found.low <= 0 <= found.high
    assert held / trials >= 0.93


def test_intervals_hold_the_truth_where_documents_are_asked_for_unequally():
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        asked_N = np.repeat(np.arange(10), np.ceil(3 * rng.pareto(1.2, 10)).clip(1, 60).astype(int))
        gain = {task: rng.normal(0, 0.3, 10)[asked_N] + rng.normal(0, 0.2, len(asked_N)) for task in "ab"}
        found = evidence.effect([gain], dict.fromkeys("ab", asked_N))
        held += found.low <= 0 <= found.high
    assert 0.9 <= held / 400 <= 0.98


def test_tasks_count_alike_and_other_seeds_add_what_they_differ_by():
    gains = [{"t": np.full(50, 2 * value), "small": np.zeros(9)} for value in (0.1, 0.2, 0.3)]
    found = evidence.effect(gains, {"t": np.arange(50), "small": np.arange(9)})
    assert found.high - 0.2 == pytest.approx(stats.sem([0.1, 0.2, 0.3]) * stats.t.ppf(0.975, 2), rel=0.02)


# Gates


def learnt(losses):
    return evidence.learnt("x", [{"loss": loss} for loss in losses])


def passed(gates):
    return [gate["passed"] for gate in gates]


def test_an_effect_that_rounds_to_zero_has_no_minus():
    assert evidence.points(evidence.Effect(-0.0003, -0.0012, 0.0004)) == "+0.0 [-0.1, +0.0] points"


def test_a_loss_falls_within_each_data_set():
    falling = 5 * np.exp(-np.arange(60) / 10) + 1 + np.random.default_rng(0).normal(0, 0.05, 60)
    assert passed(map(learnt, (falling, falling[::-1]))) == [True, False]
    assert learnt([3.0, 2.0]) == evidence.gate("x: loss at the end, below its start", 2.5, "<=", 2.5)
    # The easier data set comes last, and nothing is learnt of either.
    rows = [{"loss": 9.0 - 6 * (s > 29) + 0.01 * (s % 30), "dataset": str(s > 29)} for s in range(60)]
    assert passed([evidence.learnt("x", rows), learnt(row["loss"] for row in rows)]) == [False, True]


def test_a_denoiser_uses_what_is_left_of_the_text():
    bars = {"the untrained base's": 3.2, "the causal parent's": 2.9}
    found = [
        evidence.denoises({"0.05": left, "1.0": right}, 4.0, bars)
        for left, right in [(2.5, 9.0), (3.1, 9.0), (3.3, 9.0), (2.5, 6.0)]
    ]
    assert [*map(passed, found)] == [
        [True] * 3,
        [True, True, False],
        [True, False, False],
        [False, True, True],
    ]
    assert found[0][2]["name"] == "nats at t = 0.05, at most the causal parent's"


def test_a_model_at_chance_is_found_out():
    task = Task("t", "english", ["q"] * 200, [[str(i)] for i in range(50)], [{i % 50} for i in range(200)])
    rng = np.random.default_rng(0)
    good = rng.uniform(0.2, 0.9, 200)
    rank = rng.random((200, 50)).argsort(1).argsort(1)[np.arange(200), np.arange(200) % 50]
    chance = np.where(rank < 10, 1 / np.log2(rank + 2), 0)
    found = [evidence.above_chance("model", {"t": scores}, [task]) for scores in (good, chance)]
    assert passed(found) == [True, False]


# Claims


def test_every_claim_says_what_it_needs():
    stated = evidence.stated()
    assert len(stated) == 10 and all(about.keys() == WORKS.keys() for about in stated.values())
    assert [key for key, about in stated.items() if about["bar"]] == ["bits"]
    groups = [about["group"] for about in stated.values()]
    assert groups == ["paper"] * 4 + ["control"] * 6 and {*groups} == evidence.GROUPS.keys()
    assert all((about["group"] == "paper") == (about["paper"] != "none") for about in stated.values())


DECIDED = {(0.1, 0.3): "holds", (-0.3, -0.1): "does not hold", (-0.1, 0.1): "open", (0.0, 0.2): "open"}


@pytest.mark.parametrize(("interval", "verdict"), DECIDED.items())
def test_the_interval_decides(interval, verdict):
    effect = evidence.Effect(0.0, *interval)
    assert [evidence.judge(effect, 0.0, seeds) for seeds in (1, 2, 3)] == ["one run", "two runs", verdict]


def test_a_gate_is_judged_on_the_mean_over_seeds():
    values = [(0.55, 0.5), (0.15, 0.7), (0.35, 0.6)]
    few, many, rises = (evidence.gate("rises", value, "<=", limit) for value, limit in values)
    slope = evidence.gate("slope", 0.9, ">=", 1.0)
    assert evidence.mean_gates([few, slope, many, slope]) == [pytest.approx(rises), slope]
    assert evidence.failed([few, slope]) == "rises: 0.55, not <= 0.5; slope: 0.9, not >= 1"


# Runs


GAINS = {seed: 0.2 + 0.02 * seed + 0.1 * RNG.standard_normal(40) for seed in range(6)}  # per query


def execute(study, *seeds, corpus="c", passed=True, task=TASK, **overrides):
    """Leaves behind what the notebooks 00 and 02 of runs with these seeds would."""
    old_N, gate = np.full(40, 0.5), evidence.gate("learns", float(passed), ">=", 0.5)
    stages = {name: {"exit_status": 0} for name in ("00_backbone", "02_pair")}
    for seed in seeds:
        config = load_preset("smoke", {"training.seed": seed} | overrides)
        run = Run("02_pair", seed_run(study.name, seed) if seed else study.name, config)
        scores = {"old": old_N, "new": old_N + GAINS[seed], "older": old_N - 0.1}
        evidence.save_scores(run, [task], {name: {task.name: row_N} for name, row_N in scores.items()})
        run.save({"gates": {"pair": [gate]}, "development": {"old": 0.1, "older": 0.2}})
        replace(run, notebook="00_backbone").save({"corpus_hash": corpus})
        provenance = {"preset": resolved(config), "stages": stages, "commit": "a1b2c3d4"}
        replace(run, notebook="provenance").save(provenance)


def test_seeds_that_were_trained_elsewhere_are_told(study):
    execute(study, *range(3))
    for run in list(evidence.runs(study).values())[:2]:
        run.root.mkdir(exist_ok=True)
    assert evidence.elsewhere(study) == ", trained elsewhere: 2 (a1b2c3d)"


def claims(study):
    return {one["key"]: one for one in evidence.claims(study)}


def test_claims_are_computed_from_kept_scores_over_the_seeds_at_hand(study):
    execute(study, 0)
    alone = claims(study)["works"]
    assert alone["verdict"] == "one run" and alone["value"] == pytest.approx(GAINS[0].mean(), abs=1e-3)
    execute(study, 2, 1)
    found = claims(study)
    naive = evidence.effect([{"t": GAINS[seed]} for seed in range(3)], {"t": TASK.document_N})
    works = found["works"]
    assert [works["value"], *works["interval"]] == pytest.approx(list(naive), abs=1e-3)  # half precision
    assert works["verdict"] == "holds" and works["queries"] == 40
    assert works["seeds"] == {str(s): pytest.approx(GAINS[s].mean(), abs=1e-3) for s in range(3)}
    assert works["effect"] == evidence.points(naive).removesuffix(" points")
    assert found["big"]["verdict"] == "not asked"  # of a backbone from scratch
    assert found["chunks"]["verdict"] == found["sized"]["verdict"] == "not run"
    assert found["better"]["other"] == "older"  # on development data
    assert json.loads(json.dumps(found)) == found


def test_any_two_systems_are_compared_by_the_scores_that_runs_kept(study):
    execute(study, 0, 1)
    studies = [replace(run, notebook="02_pair") for run in evidence.runs(study).values()]
    found, seeds = evidence.kept_effect(studies, "new", "old")
    naive = evidence.effect([{"t": GAINS[seed]} for seed in range(2)], {"t": TASK.document_N})
    assert seeds == 2 and [*found] == pytest.approx([*naive], abs=1e-3)
    assert evidence.kept_effect(studies, "new", "old", contextual=False) == (found, 2)
    assert evidence.kept_effect(studies, "new", "old", contextual=True) == (None, 0)
    assert evidence.kept_effect(studies, "new", "no such system") == (None, 0)


def test_a_training_that_failed_its_gate_or_saved_none_makes_a_claim_invalid(study):
    def judged():
        return claims(study)["works"]["verdict"], claims(study)["works"]["why"]

    execute(study, 0)
    execute(study, 1, 2, passed=False)
    assert judged() == ("invalid", "learns: 0.333, not >= 0.5")
    execute(study, 1)  # the mean over seeds passes
    assert judged()[0] == "holds"
    run = replace(study, notebook="02_pair", name="smoke-seed1")
    run.save(run.load("02_pair") | {"gates": {}})
    assert judged() == ("invalid", "no gates of pair (02_pair) in seeds 1")


@pytest.mark.parametrize("changes", [{"name": "u"}, {"relevant": [{i % 4} for i in range(40)]}])
def test_a_seed_that_asked_other_queries_is_not_pooled(study, changes):
    execute(study, 0, 2)
    execute(study, 1, task=replace(TASK, **changes))
    works = claims(study)["works"]
    assert (works["verdict"], [*works["seeds"]]) == ("two runs", ["0", "2"])
    assert works["why"] == "left out, since they asked other queries: seeds 1"
    studies = [replace(run, notebook="02_pair") for run in evidence.runs(study).values()]
    assert evidence.kept_effect(studies, "new", "old")[1] == 2


def test_what_was_run_and_kept_no_scores_is_told_and_what_is_broken_named(study):
    execute(study, 0)
    reason = "notebook 02 saved no scores of these systems on contextual tasks"
    assert claims(study)["chunks"]["why"] == reason
    path = study.results / "scores" / "02_pair.parquet"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match=r"02_pair\.parquet is broken .*: copy or make it again"):
        evidence.claims(study)


def test_earlier_numbers_are_shown_until_kept_scores_suffice(study):
    """Three seeds do, whatever there was before."""
    execute(study, 0)
    earlier = {"value": -0.1, "interval": [-0.2, -0.05], "seeds": dict.fromkeys("01234", -0.1)}
    earlier |= {"verdict": "does not hold", "why": "by an earlier definition: over all queries"}
    write_json(study.results / "earlier.json", {"works": earlier})
    works = claims(study)["works"]
    assert (works["verdict"], works["value"]) == ("does not hold", -0.1)
    assert works["why"] == "by an earlier definition: over all queries"
    execute(study, 1, 2)
    assert claims(study)["works"]["value"] > 0


def test_runs_that_cannot_be_compared_are_left_out_and_named(study):
    execute(study, 0)
    execute(study, 1, corpus="another")
    execute(study, 2, **{"pair.lr": 0.5})
    execute(study, 3)
    (study.results.parent / "smoke-seed3" / "provenance.json").unlink()
    execute(study, 4, **{"pair.keep_tokens": 1, "pair.token_budget": 99})  # on a smaller machine
    twin = study.results.parent / "smoke-seed5"  # a copy of seed 4, whose numbers would count twice
    shutil.copytree(study.results.parent / "smoke-seed4", twin)
    reasons = evidence.left_out(study)
    assert reasons.pop("smoke-seed5") == "was trained with seed 4"
    assert reasons.pop("smoke-seed3").startswith("has no provenance.json")
    assert reasons == {"smoke-seed1": "differs in corpus", "smoke-seed2": "differs in pair.lr"}
    assert list(evidence.metrics(study)) == [0, 4] and [*claims(study)["works"]["seeds"]] == ["0", "4"]


def test_a_notebook_that_failed_is_left_out_and_a_run_of_other_values_refused(study):
    execute(study, 0)
    about, record = study.load("provenance"), replace(study, notebook="provenance")
    stages = about["stages"] | {"02_pair": {"exit_status": 1}}
    record.save(about | {"stages": stages})
    assert list(evidence.metrics(study)[0]) == ["00_backbone"]
    assert evidence.left_out(study) == {"smoke, 02_pair": "failed when it last ran"}
    with pytest.raises(ValueError, match=r"02_pair of run 'smoke' failed .*: `unmask run --preset smoke"):
        evidence.metrics(study, "02_pair")
    with pytest.raises(ValueError, match="12_report of run 'smoke' was not run"):
        evidence.metrics(study, "12_report")
    record.save(about | {"preset": resolved(load_preset("smoke", {"pair.lr": 0.5}))})
    with pytest.raises(ValueError, match=r"run 'smoke' differs in pair\.lr"):
        evidence.metrics(study)


def test_a_repetition_counts_by_the_notebooks_that_saved_something(study):
    """Nothing of it is here but its folder of results: another machine may have made it."""
    execute(study, 0, 1)
    (study.results.parent / "smoke-seed1" / "02_pair.json").unlink()
    counted = {seed: list(saved) for seed, saved in evidence.metrics(study).items()}
    assert counted == {0: ["00_backbone", "02_pair"], 1: ["00_backbone"]}
    assert [*claims(study)["works"]["seeds"]] == ["0"]
    execute(study, 1)
    (study.results / "02_pair.json").unlink()  # this run itself may lack a notebook
    assert [*claims(study)["works"]["seeds"]] == ["1"]
