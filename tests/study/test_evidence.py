"""Effects against naive loops, gates, verdicts, and claims kept, pooled over seeds and compared."""

import json
import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
from scipy import stats

from unmask.config import load_preset, resolved, seeded
from unmask.evaluation.tasks import Task
from unmask.run import Run, seed_run
from unmask.store import repository
from unmask.study import evidence

RNG = np.random.default_rng(4)
WORKS = {"claim": "It works.", "source": "table 1", "paper": "+3", "above": 0.1, "notebook": "02_pair"}
SCALES = {"claim": "It scales.", "source": "s", "paper": "p", "why": "needs 64 GPUs", "notebook": "02_pair"}
CLAIMS = {"works": WORKS | {"headline": True}, "scales": SCALES}
CLAIMS["sized"] = {"claim": "It works at {size}.", "source": "s", "paper": "p", "below": 0, "unit": "nats"}
CLAIMS["sized"]["notebook"] = "02_pair"


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Notebook 12 of the run "smoke" with other claims, in an empty checkout."""
    monkeypatch.setattr("unmask.run.repository", lambda: tmp_path)
    monkeypatch.setattr(evidence, "stated", lambda: CLAIMS)
    return Run("12_report", "smoke", load_preset("smoke"))


# Effects


def test_the_resamples_are_those_of_a_loop_and_the_same_for_all():
    """Resample b holds the same clusters of queries for every system: what pooling over seeds rests on."""
    (a, b), cluster_N, drawn = RNG.random((2, 50)), RNG.integers(0, 20, 50), np.random.default_rng(0)
    rows_C = [np.flatnonzero(cluster_N == cluster) for cluster in np.unique(cluster_N)]
    one, two = evidence.bootstrap(a, 20, cluster_N), evidence.bootstrap(b, 20, cluster_N)
    few = len(rows_C)
    wider = (few / (few - 1)) ** 0.5 * stats.t.ppf(0.975, few - 1) / stats.norm.ppf(0.975)
    for means in zip(one.replicates_B, two.replicates_B, strict=True):
        rows = np.concatenate([rows_C[c] for c in drawn.integers(few, size=few)])
        assert means == pytest.approx([x.mean() + wider * (x[rows].mean() - x.mean()) for x in (a, b)])
    assert evidence.bootstrap(a - b, 20, cluster_N).replicates_B == pytest.approx((one - two).replicates_B)


def test_queries_of_one_document_are_drawn_together():
    """Drawn alone, they make intervals that miss the truth, which is 0, in more than three of ten trials."""
    task = Task("t", "contextual", [*"abcd"], [["a", "b"], ["c", "d"]], [{3}, {0, 1}, {2}, {1, 2}])
    asked = evidence.documents_asked([task])
    assert asked == ["t 1", "t 0", "t 1", "t 0"] and evidence.documents_asked([task, task]) == asked * 2
    ours, other = {"t": np.arange(4.0)}, {"t": np.ones(4)}
    found = evidence.compare(ours, other, [task], SimpleNamespace(bootstrap=99))
    assert found.interval == evidence.bootstrap(ours["t"] - 1, 99, asked).interval
    rng, cluster_N = np.random.default_rng(0), np.repeat(np.arange(40), 5)
    trials = rng.standard_normal((200, 40))[:, cluster_N] + rng.standard_normal((200, 200)) / 2
    ends = [[evidence.bootstrap(x_N, 200, drawn).interval for x_N in trials] for drawn in (None, cluster_N)]
    held = [sum(low <= 0 <= high for low, high in some) for some in ends]
    assert held[0] < 140 and held[1] >= 175
    low, high = evidence.bootstrap([0.0, 1, 1], 200, ["the only document"] * 3).interval
    assert low < 2 / 3 < high


def test_what_is_no_mean_is_computed_in_every_resample():
    start, end = (evidence.bootstrap(RNG.random(40), 200) for _ in range(2))
    share = (start - end).share_of(start)
    assert share.value == pytest.approx(1 - end.value / start.value)
    assert share.replicates_B == pytest.approx(1 - end.replicates_B / start.replicates_B)


def test_the_lowest_of_several_is_above_a_bar_if_all_are_and_below_it_if_one_surely_is():
    effects = [evidence.bootstrap(RNG.random(40) + shift, 2000) for shift in (0.05, 0, 0.3)]
    lowest = evidence.lowest([evidence.lowest(effects[:2]), effects[2]])
    assert lowest.value == min(effect.value for effect in effects)
    ends = [np.quantile(effect.replicates_B, [0.025, 1 - 0.025 / 3]) for effect in effects]
    assert lowest.interval == pytest.approx(tuple(np.min(ends, axis=0)))
    assert lowest.chance(0.2) == max(effect.chance(0.2) for effect in effects)
    assert lowest.chance(0.7) == pytest.approx(3 * min(effect.chance(0.7) for effect in effects), abs=2e-3)


# Seeds


def test_pooling_adds_what_other_seeds_would_to_what_other_queries_would():
    effects = [evidence.bootstrap(RNG.random(60), 2000) for _ in range(3)]
    together, values = evidence.pool(effects), [effect.value for effect in effects]
    assert together.value == pytest.approx(np.mean(values))
    drawn = np.random.default_rng(7)
    queries = np.mean([effect.replicates_B for effect in effects], axis=0)
    naive = drawn.choice(queries, 10**6) + drawn.standard_t(2, 10**6) * np.std(values, ddof=1) / 3**0.5
    assert together.interval == pytest.approx(tuple(np.quantile(naive, [0.025, 0.975])), abs=0.01)
    worst = evidence.lowest(effects)
    assert evidence.pool([worst]) is worst  # one seed changes nothing
    assert together.chance(-9) < 2e-5  # no draw would show it, and Holm's correction asks for 0.002
    bars = np.quantile(naive, [0.02, 0.4, 0.9])
    drawn = [2 * min(np.mean(naive <= bar), np.mean(naive >= bar)) for bar in bars]
    assert [together.chance(bar) for bar in bars] == pytest.approx(drawn, abs=2e-3)


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0])  # of the seeds, in standard errors of one seed's queries
@pytest.mark.parametrize("several", [1, 5])  # effects, whose lowest is asked for
def test_intervals_over_seeds_hold_the_truth(seeds, spread, several):
    """Documents, each with its queries, and seeds have effects of their own, and so has each document in each
    seed; the truth is 0."""
    rng, trials, n = np.random.default_rng(0), 600, 100
    drawn_NB, held = rng.multinomial(n, np.full(n, 1 / n), size=200).T, 0  # how often, in each resample
    for _ in range(trials):
        own_SF1 = rng.standard_normal((seeds, several, 1)) * spread / n**0.5
        own_SFN = own_SF1 + rng.standard_normal((seeds, several, n)) / 2
        values_SFN = own_SFN + rng.standard_normal((several, n))
        effects = [evidence.Effect(v.mean(1).min(), v @ drawn_NB / n) for v in values_SFN]
        low, high = evidence.pool(effects).interval
        held += low <= 0 <= high
    assert held / trials >= 0.93


def test_neighbouring_steps_are_drawn_together():
    walk = np.cumsum(np.random.default_rng(3).standard_normal(60)) / 5  # every step is like the one before
    alone, blocks = (evidence.bootstrap(walk, 500, block=block) for block in (1, 10))
    assert alone.value == blocks.value
    assert np.std(blocks.replicates_B) > 2 * np.std(alone.replicates_B)
    means = [np.roll(walk, -start)[:10].mean() for start in range(60)]
    first, wider = np.random.default_rng(0).choice(means, 6).mean(), 1.2**0.5 * stats.t.ppf(0.975, 5) / 1.96
    assert blocks.replicates_B[0] == pytest.approx(walk.mean() + wider * (first - walk.mean()), abs=1e-4)


@pytest.mark.parametrize(("steps", "block"), [(8, 2), (13, 2), (10, 1)])
def test_intervals_of_few_steps_or_clusters_hold_the_truth(steps, block):
    """Not stretched, they would in 84, 87 and 90 % of trials."""
    trials = np.random.default_rng(0).standard_normal((600, steps))
    ends = [evidence.bootstrap(values, 400, block=block).interval for values in trials]
    assert 0.92 <= np.mean([low <= 0 <= high for low, high in ends]) <= 0.99


def test_holms_correction_takes_back_what_chance_may_have_found(study):
    def line(number, p, verdict="reproduced", **more):
        return {"claim": str(number), "headline": True, "p": p, "verdict": verdict, "ours": "+1"} | more

    claims = [line(i, p) for i, p in enumerate([0.02, 0.001, 0.012, 0.03])]
    few = "undecided"
    claims += [line(4, 0.2, few), line(5, 0.0, "invalid"), line(6, 0.04, headline=False), line(7, None)]
    found = [one["verdict"] for one in evidence.corrected(claims)]
    # 0.001 ≤ 0.05/5, 0.012 ≤ 0.05/4, but 0.02 > 0.05/3, and what comes after it falls with it.
    assert found == [few, "reproduced", "reproduced", few, few, "invalid", "reproduced", "reproduced"]
    why = "p = 0.020, too large for Holm's correction over 5 headline claims"
    assert evidence.corrected(claims)[0].items() > {"ours": f"+1; {why}", "lost_to": "Holm"}.items()
    effect = evidence.bootstrap(np.array([0.1, 0.2, 0.3]), 999)
    assert evidence.claim(study, "works", effect)["p"] == effect.chance(0.1)
    assert effect.chance(0.1) == pytest.approx(2 * (1 + np.sum(effect.replicates_B <= 0.1)) / 1000)


# Gates


def curve(losses):
    return [{"loss": loss} for loss in losses]


def passed(found):
    return [gate["passed"] for gate in found]


def test_a_falling_loss_passes_and_each_fault_fails_its_own_gate():
    falling = 5 * np.exp(-np.arange(60) / 10) + 1 + np.random.default_rng(0).normal(0, 0.05, 60)
    back = np.concatenate([falling[:40], np.linspace(1, 4, 20)])
    assert passed(evidence.learnt("x", curve(falling), math.log(255))) == [True, True, True]
    assert passed(evidence.learnt("x", curve(falling), 0.5)) == [True, False, True]
    assert passed(evidence.learnt("x", curve(falling[::-1]), 9.0)) == [False, True, False]
    assert passed(evidence.learnt("x", curve(back), 9.0)) == [True, True, False]
    assert passed(evidence.learnt("x", curve([3.0, 2.0]), 9.0)) == [True, True]  # of a smoke run: no rise
    noisy = np.concatenate([falling[:40], 1 + 3 * np.random.default_rng(1).random(20)])
    assert passed(evidence.learnt("x", curve(noisy), 9.0)) == [True, True]  # could rise by half, unseen


def test_a_denoiser_uses_what_is_left_of_the_text():
    found = [
        evidence.denoises({"0.05": left, "1.0": right}, {"0.05": 3.2, "1.0": 9.0}, 2.9, 4.0, beats=beats)
        for left, right, beats in [(2.5, 9.0, True), (3.1, 9.0, True), (3.3, 9.0, False), (3.1, 7.0, False)]
    ]
    assert [*map(passed, found)] == [[True] * 3, [True, True, False], [True, False], [False, True]]


def test_a_model_at_chance_is_found_out():
    task = Task("t", "english", ["q"] * 200, [[str(i)] for i in range(50)], [{i % 50} for i in range(200)])
    rng, config = np.random.default_rng(0), SimpleNamespace(bootstrap=200)
    good = rng.uniform(0.2, 0.9, 200)
    rank = rng.random((200, 50)).argsort(1).argsort(1)[np.arange(200), np.arange(200) % 50]
    chance = np.where(rank < 10, 1 / np.log2(rank + 2), 0)
    found = [evidence.above_chance("model", {"t": scores}, [task], config) for scores in (good, chance)]
    assert passed(found) == [True, False]


@pytest.mark.parametrize("sets", [1, 20, 60])  # each once or more in the last third
def test_a_rise_is_found_among_many_data_sets_and_where_each_comes_once_nothing_is_asked(sets):
    of_S, noise = np.arange(100) % sets, np.random.default_rng(1)
    rows = [{"loss": 3 + 0.03 * s + noise.normal(0, 0.2), "dataset": str(of_S[s])} for s in range(100)]
    *_, rise = evidence.learnt("x", rows, 9.0)
    assert rise["passed"] == (sets == 60) and (sets == 60 or rise["value"] == pytest.approx(1, abs=0.4))


def test_the_base_rate_is_given_or_what_the_steps_log_and_a_spike_at_the_start_lets_no_guess_pass():
    rows = [{"loss": 5.27, "guess": 5.26, "dataset": "spiky" if s > 12 else "calm"} for s in range(16)]
    rows[0] = {"loss": 9.0, "guess": 5.3, "dataset": "spiky"}
    logged, given = evidence.learnt("x", rows)[1], evidence.learnt("x", rows, 5.28)[1]
    assert (logged["bar"], logged["passed"]) == ("<= 5.26", False)
    assert (given["bar"], given["passed"]) == ("<= 5.28", True)


# Verdicts and claims


def test_every_claim_says_what_it_needs_and_the_protocol_lists_the_headline_claims():
    rows = ["| claim | number | bar | source | notebook |", "|---|---|---|---|---|"]
    for key, about in evidence.stated().items():
        assert {"claim", "source", "paper"} <= about.keys(), key
        assert ("above" in about) + ("below" in about) <= 1, key
        if about.get("headline"):
            side, bar = next((side, about[side]) for side in ("above", "below") if side in about)
            shown = f"{'>' if side == 'above' else '<'} {f'{100 * bar:g} points' if bar else 0}"
            text, shown = re.sub(r"{\w+}", "…", about["claim"]), shown.replace("-", "−")
            number = about["notebook"].partition("_")[0]
            rows.append(f"| {text} | {about['number']} | {shown} | {about['source']} | {number} |")
    protocol = (repository() / "results" / "PROTOCOL.md").read_text(encoding="utf8")
    assert "\n".join(rows) in protocol, "results/PROTOCOL.md must hold\n" + "\n".join(rows)


def test_every_claim_of_claims_yaml_is_tested_by_its_notebook_and_no_other():
    for path in (repository() / "notebooks").glob("*.ipynb"):
        code = "\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code")
        used = set(re.findall(r"claim\(study, \"([\w-]+)\"", code))
        used |= set(re.findall(r"(?:not_run|compared)\(\"([\w-]+)\"", code))
        own = {key for key, about in evidence.stated().items() if about["notebook"] == path.stem}
        formed = path.stem in ("07_diffusion_vs_ar", "12_report")  # these put keys together
        assert used <= own and (formed or used == own), path.name
        said = set(re.findall(r'"([\w-]+)"', code))
        assert {key.removesuffix("-loss") for key in own if not key.startswith("table-")} <= said, path.name


INTERVALS = {
    (0.1, 0.3): ("reproduced", "contradicted"),
    (-0.3, -0.1): ("contradicted", "reproduced"),
    (-0.1, 0.1): ("undecided", "undecided"),
    (0.0, 0.2): ("undecided", "undecided"),  # the bar itself is not above the bar
}


@pytest.mark.parametrize(("interval", "verdicts"), INTERVALS.items())
def test_the_interval_decides(interval, verdicts):
    assert (evidence.judge(interval, above=0.0), evidence.judge(interval, below=0.0)) == verdicts


def test_a_claim_is_judged_by_its_effect_and_a_training_that_failed_makes_it_invalid(study):
    effect = evidence.bootstrap([0.29, 0.3, 0.31], 100)
    made = evidence.claim(study, "works", effect, detail="a → b")
    assert (made["claim"], made["source"], made["paper"]) == ("It works.", "table 1", "+3")
    assert made["verdict"] == "reproduced" and made["headline"] and made["bar"] == {"above": 0.1}
    assert made["ours"] == f"{evidence.points(effect)}; a → b" and made["effect"] == evidence.points(effect)
    assert (made["value"], made["interval"]) == (effect.value, list(effect.interval))
    against = evidence.claim(study, "sized", effect, size=7)
    assert (against["claim"], against["verdict"]) == ("It works at 7.", "contradicted")
    assert (against["bar"], against["unit"], against["seeds"]) == ({"below": 0}, "nats", [0])
    well, badly = evidence.at_least("slope", 5.0, 4.0), evidence.at_least("slope", 0.1, 4.0)
    assert evidence.claim(study, "works", effect, gates=[well])["verdict"] == "reproduced"
    assert evidence.claim(study, "works", effect, gates=[well, badly])["verdict"] == "invalid"
    assert evidence.failed([well, badly]) == "slope: 0.1, not >= 4"


def test_a_gate_is_judged_on_the_mean_over_seeds():
    few, many = evidence.at_most("rises", 0.55, 0.5), evidence.at_most("rises", 0.15, 0.7)
    slope = evidence.at_least("slope", 0.9, 1.0)
    rises = {"name": "rises", "value": pytest.approx(0.35), "bar": "<= 0.6", "passed": True}
    assert evidence.mean_gates([few, slope, many, slope]) == [rises, slope] and not slope["passed"]


def test_what_was_not_run_says_why(study):
    kept = evidence.keep(study, [evidence.claim(study, "works", evidence.bootstrap([0.0, 1.0], 9))])
    kept += [evidence.not_run("scales"), evidence.not_run("scales", "no data")]
    assert [one["verdict"] for one in kept[1:]] == ["not run", "not run"]
    assert [one["ours"] for one in kept[1:]] == ["not run (needs 64 GPUs)", "not run (no data)"]
    assert evidence.not_run("sized", "no data")["claim"] == "It works at …."
    assert len({frozenset(one) for one in kept}) == 1
    assert json.loads(json.dumps(kept)) == kept


# Runs


EFFECTS = {seed: 0.2 + 0.02 * seed + 0.1 * RNG.standard_normal(40) for seed in range(5)}  # per query


def execute(study, seed, *, corpus="c", **overrides):
    """Leaves behind what the notebooks 00 and 02 of a run with this seed would."""
    name = seed_run(study.name, seed) if seed else study.name
    config = load_preset("smoke", seeded(seed) | overrides)
    run = Run("02_pair", name, config)
    works = evidence.claim(run, "works", evidence.bootstrap(EFFECTS[seed], 100))
    size = [evidence.claim(run, "sized", evidence.bootstrap(EFFECTS[seed], 100), size=7)] * (seed != 1)
    run.save({"claims": evidence.keep(run, [works, *size, evidence.not_run("scales")])})
    replace(run, notebook="00_backbone").save({"corpus_hash": corpus, "claims": []})
    record = {"exit_status": 0, "otherwise": {}, "data": "d", "reads": ["data"]}
    stages = {"00_backbone": record, "02_pair": record | {"reads": ["data", "pair"]}}
    replace(run, notebook="provenance").save({"preset": resolved(config), "stages": stages})


def test_claims_are_pooled_over_the_seeds_at_hand(study):
    execute(study, 0)
    (alone, *_) = evidence.pooled(study)
    assert alone["seeds"] == [0] and alone["value"] == evidence.bootstrap(EFFECTS[0], 100).value
    for seed in (2, 1):
        execute(study, seed)
    works, sized, scales = evidence.pooled(study)
    naive = evidence.pool([evidence.bootstrap(EFFECTS[seed], 100) for seed in range(3)])
    assert works["value"] == pytest.approx(naive.value) and works["ours"] == works["effect"]
    # The resamples were kept in half precision.
    assert works["interval"] == pytest.approx(naive.interval, abs=1e-4)
    assert works["seeds"] == [0, 1, 2] and works["verdict"] == evidence.judge(naive.interval, above=0.1)
    assert works["values"] == {str(seed): pytest.approx(EFFECTS[seed].mean()) for seed in range(3)}
    assert sized["seeds"] == [0, 2]  # seed 1 could not test it
    assert json.loads(json.dumps([works, sized, scales])) == [works, sized, evidence.not_run("scales")]


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
    assert reasons == {"smoke-seed1": "differs in corpus", "smoke-seed2, 02_pair": "differs in pair.lr"}
    assert list(evidence.metrics(study)) == [0, 2, 4] and evidence.pooled(study)[0]["seeds"] == [0, 4]


def test_what_of_a_run_was_made_otherwise_or_failed_is_left_out(study):
    execute(study, 0)
    about = study.load("provenance")
    for changes in ({"otherwise": {"pair.lr": 0.5}}, {"data": "another"}, {"exit_status": 1}):
        pair = about["stages"]["02_pair"] | changes
        replace(study, notebook="provenance").save(about | {"stages": about["stages"] | {"02_pair": pair}})
        assert list(evidence.metrics(study)[0]) == ["00_backbone"] and len(evidence.left_out(study)) == 1
    first = about["stages"]["00_backbone"] | {"data": ""}  # as earlier versions recorded it
    replace(study, notebook="provenance").save(about | {"stages": about["stages"] | {"00_backbone": first}})
    assert not evidence.left_out(study)
    first |= {"exit_status": 1}
    replace(study, notebook="provenance").save(about | {"stages": about["stages"] | {"00_backbone": first}})
    with pytest.raises(ValueError, match="smoke' failed when it last ran: `unmask run --preset smoke"):
        evidence.metrics(study)
    with pytest.raises(ValueError, match="12_report of run 'smoke' was not run"):
        evidence.metrics(study, "12_report")


def test_a_repetition_counts_by_the_notebooks_that_saved_something(study):
    """Nothing of it is here but its folder of results: another machine may have made it."""
    for seed in range(2):
        execute(study, seed)
    (study.results.parent / "smoke-seed1" / "02_pair.json").unlink()
    counted = {seed: list(saved) for seed, saved in evidence.metrics(study).items()}
    assert counted == {0: ["00_backbone", "02_pair"], 1: ["00_backbone"]}
    assert evidence.pooled(study)[0]["seeds"] == [0]
    execute(study, 1)
    (study.results / "02_pair.json").unlink()  # this run itself may lack a notebook
    assert evidence.pooled(study)[0]["seeds"] == [1]
