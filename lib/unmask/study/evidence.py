"""Claims and what they rest on: effects with intervals over queries and seeds, gates of trainings, verdicts.

An effect is a number with its bootstrap resamples over queries, in which those that one document answers stay
together. Every run asks the same queries, and one random stream draws them: resample b holds the same
queries for every system and every seed. So effects of the same queries can be subtracted, divided and
compared resample by resample, and averaged over seeds.

A training that fails its own purpose says nothing about the paper: a claim that rests on it is "invalid",
neither "contradicted" nor "undecided". A gate is a number, its bar, and whether it passed; notebooks
keep their gates beside their metrics, claims carry those that they rest on.

What is claimed, by whom and with which bar stands in claims.yaml and nowhere else.

Shape suffixes: N queries · C clusters of them · B resamples · S seeds, in `learnt` steps.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy import stats

from unmask.config import EvaluationConfig, comparable, resolved
from unmask.evaluation.tasks import Task, ndcg
from unmask.run import Run, seed_runs
from unmask.store import replacing

VERDICTS = ("reproduced", "undecided", "contradicted", "invalid", "not run")
NOTHING = 1e-3  # a score below it found nothing, and has no shares
Gate = dict[str, Any]
Line = dict[str, Any]  # what is said of a claim, as in claims.json
Values = Sequence[float] | np.ndarray
Scores = Mapping[str, np.ndarray]  # task → a metric per query


# Effects


@dataclass(frozen=True, eq=False)
class Effect:
    """A number computed from queries, and its value in each bootstrap resample of them.

    Effects of the same queries can be combined: their difference and their share are computed in every
    resample. The lowest of several keeps the resamples of each, (F, B): see `lowest`.

    Example:
        >>> ours, other = bootstrap([0.9, 0.8, 0.7, 0.9], 1000), bootstrap([0.5, 0.6, 0.6, 0.6], 1000)
        >>> gain = ours - other
        >>> low, high = gain.interval
        >>> f"{gain.value:.2f} {0 < low < gain.value < high}"
        '0.25 True'
    """

    value: float
    replicates_B: np.ndarray
    pooled: tuple[np.ndarray, np.ndarray, int] | None = None  # of `pool`: 1/S · Σ r, σ/√S and S − 1

    @property
    def centres(self) -> Values:
        """The value; of the lowest of several, the mean of each one's resamples."""
        return self.replicates_B.mean(axis=1) if self.replicates_B.ndim > 1 else [self.value]

    @property
    def interval(self) -> tuple[float, float]:
        """95 %, from the resamples; for a minimum see `lowest`."""
        low, high = np.quantile(self.replicates_B, [0.025, 1 - 0.025 / len(self.centres)], axis=-1)
        return float(np.min(low)), float(np.min(high))

    def chance(self, bar: float) -> float:
        """Two-sided p-value for an effect at the bar: twice the smaller share of resamples on either side
        of it. For several seeds the share is computed, not sampled: sampled tails would vary, and
        verdicts with them."""
        if self.pooled:
            queries_FB, sem_F1, free = self.pooled
            sides = [of((bar - queries_FB) / sem_F1, free).mean(axis=1) for of in (stats.t.cdf, stats.t.sf)]
            return min(1.0, 2 * float(min(sides[0].max(), len(sem_F1) * sides[1].min())))
        below, above = (np.sum(x, axis=-1) for x in (self.replicates_B <= bar, self.replicates_B >= bar))
        beyond = min(np.max(below), len(self.centres) * np.min(above))
        return min(1.0, 2 * (1 + float(beyond)) / (1 + self.replicates_B.shape[-1]))

    def __iter__(self) -> Iterator[float]:
        """value, low, high."""
        return iter((self.value, *self.interval))

    def __sub__(self, other: "Effect") -> "Effect":
        return Effect(self.value - other.value, self.replicates_B - other.replicates_B)

    def share_of(self, whole: "Effect") -> "Effect":
        """This as a share of a score; a score below 0.001 counts as 0.001."""
        replicates_B = self.replicates_B / np.maximum(whole.replicates_B, NOTHING)
        return Effect(self.value / max(whole.value, NOTHING), replicates_B)


def bootstrap(values_N: Values, samples: int, cluster_N: Values | None = None, *, block: int = 1) -> Effect:
    """The mean over queries, by resampling clusters of queries: the sum of the values drawn, divided by the
    number of queries drawn.

    Resamples of few clusters spread too little, and their spread itself is uncertain. So they are
    stretched about the mean by √(C / (C − 1)) · t / z, with t and z the 97.5 % quantiles of Student's
    distribution with C − 1 degrees of freedom and of the normal one: by 1.87 for eight steps in pairs, 1.22
    for ten clusters, 1.006 for 300.

    Args:
        values_N: a metric per query, or the difference of two systems' over the same queries.
        samples: number of resamples.
        cluster_N: what queries share that succeed or fail together, for instance the document that answers
            them (`documents_asked`). Default: nothing.
        block: clusters in a row that are drawn together, the first after the last: more than 1 for values
            that depend on their neighbours, as the losses of training steps do.
    """
    values_N = np.asarray(values_N, dtype=np.float64)
    _, number_N = np.unique(range(len(values_N)) if cluster_N is None else cluster_N, return_inverse=True)
    # One cluster alone says nothing of others: the queries are drawn one by one.
    number_N = number_N if number_N.any() else np.arange(len(values_N))
    size_C, sum_C = np.bincount(number_N), np.bincount(number_N, values_N)
    sizes_C, sums_C = (sum(np.roll(x_C, -shift) for shift in range(block)) for x_C in (size_C, sum_C))
    generator = np.random.default_rng(0)  # one stream for all, see the top of this file
    drawn = (generator.integers(len(sum_C), size=math.ceil(len(sum_C) / block)) for _ in range(samples))
    mean, means_B = float(values_N.mean()), np.array([sums_C[c].sum() / sizes_C[c].sum() for c in drawn])
    blocks = max(2, len(sum_C) / block)
    wider = (blocks / (blocks - 1)) ** 0.5 * stats.t.ppf(0.975, blocks - 1) / stats.norm.ppf(0.975)
    return Effect(mean, mean + wider * (means_B - mean))


def documents_asked(tasks: Sequence[Task]) -> list[str]:
    """For each query of the tasks in turn, the document that answers it (of several the first)."""
    document_M = {task.name: task.document_M for task in tasks}
    return [f"{t.name} {document_M[t.name][min(chunks)]}" for t in tasks for chunks in t.relevant]


def compare(ours: Scores, other: Scores, tasks: Sequence[Task], config: EvaluationConfig) -> Effect:
    """How much better `ours` is than `other`: mean difference over all queries of the tasks, the documents
    that they ask for drawn anew."""
    gain_N = np.concatenate([ours[task.name] - other[task.name] for task in tasks])
    return bootstrap(gain_N, config.bootstrap, documents_asked(tasks))


def lowest(effects: Sequence[Effect]) -> Effect:
    """The minimum of several effects. F is their number, with effects that are minima themselves split up.

    The minimum within each resample would be biased low, most of all for effects that are alike. So each
    keeps its own resamples and its own interval. All true values lie above a bar if all intervals do (an
    intersection-union test, which needs no correction): the lower end is the minimum of the lower ends. One
    lies below a bar if its interval does, at a level of 2.5 % / F (Bonferroni): the upper end is the minimum
    of the upper ends.
    """
    return Effect(min(one.value for one in effects), np.vstack([one.replicates_B for one in effects]))


def pool(effects: Sequence[Effect]) -> Effect:
    """One effect of several seeds: its mean, over other queries and other seeds.

        r_b = 1/S · Σ_s r[s, b] + t_b · σ/√S

    The first part has the same queries resampled for all seeds. The second is what other seeds would add: σ
    is the standard deviation of the seeds' values, and t_b are the quantiles of Student's t distribution with
    S − 1 degrees of freedom, in random order; each resample meets 20 of them. One seed changes nothing.

    Of few seeds, drawing with replacement makes intervals that are too short; these hold the true effect in
    95 to 98 % of simulated studies of 3 to 5 seeds, whether queries or seeds decide, if seeds are normal. If
    one training in three learns and the others do not, it is 84 % of 3 seeds and 92 % of 5.
    """
    if len(effects) == 1:
        return effects[0]
    centres_SF = [effect.centres for effect in effects]
    queries_FB = np.atleast_2d(np.mean([effect.replicates_B for effect in effects], axis=0))
    sem_F1, free = np.maximum(stats.sem(centres_SF), 1e-12)[:, None], len(effects) - 1
    replicates_FB = np.tile(queries_FB, 20)
    order_B = np.random.default_rng(1).permutation(replicates_FB.shape[1])
    replicates_FB += sem_F1 * stats.t.ppf((order_B + 0.5) / len(order_B), free)
    return Effect(float(np.mean(centres_SF, axis=0).min()), replicates_FB, (queries_FB, sem_F1, free))


def points(effect: Effect, unit: str = "points") -> str:
    """An effect with its interval: "+12.3 [+10.1, +14.6] points", which are hundredths, or in another unit as
    it is: "-0.345 [-0.400, -0.286] nats"."""
    value, low, high = (in_unit(number, unit) for number in effect)
    return f"{value} [{low}, {high}] {unit}"


def in_unit(number: float, unit: str) -> str:
    """A difference without its unit: in points, which are hundredths, "+12.3"; in another one "-0.345"."""
    return f"{100 * number:+.1f}" if unit == "points" else f"{number:+.3f}"


# Gates


def at_least(name: str, value: float, bar: float) -> Gate:
    """A gate that passes if value >= bar."""
    return {"name": name, "value": float(value), "bar": f">= {bar:.6g}", "passed": bool(value >= bar)}


def at_most(name: str, value: float, bar: float) -> Gate:
    """A gate that passes if value <= bar."""
    return {"name": name, "value": float(value), "bar": f"<= {bar:.6g}", "passed": bool(value <= bar)}


def learnt(name: str, curve: Sequence[Mapping[str, Any]], base_rate: float | None = None) -> list[Gate]:
    """Whether a training's loss fell: below its start, below its base rate, and did not rise at the end.

    Start and end are the first and the last tenth of the steps, three at least. Losses of different data sets
    are not comparable: for the first check each is taken as its distance from the mean of its data set, for
    the second as it is, beside its own base rate. A rise is the slope over the last third of the steps times
    their number, data sets' means taken out of both; it counts if its 95 % interval lies above 0. It is not
    asked for where it could not be seen: each data set comes once, or half the interval is over a third of
    the loss.

    Args:
        name: of the training; curve: its logged steps, with "loss" and perhaps "dataset".
        base_rate: nats of a guess from the number of answers, or from their frequencies, alone. Default:
            what the steps log as "guess".
    """
    of_S = np.array([row.get("dataset", "") for row in curve])
    raw_S = np.array([row["loss"] for row in curve], float)
    guess_S = np.array([row["guess"] if base_rate is None else base_rate for row in curve], float)

    def within(x_S: np.ndarray, of_S: np.ndarray = of_S) -> np.ndarray:
        """Distances from the means of the data sets."""
        _, number_S = np.unique(of_S, return_inverse=True)
        return x_S - (np.bincount(number_S, x_S) / np.bincount(number_S))[number_S]

    loss_S = within(raw_S) + raw_S.mean()
    few, last = max(3, len(loss_S) // 10), max(4, len(loss_S) // 3)
    start, end = loss_S[:few].mean(), loss_S[-few:].mean()
    tail_S, place_S = (within(x_S[-last:], of_S[-last:]) for x_S in (loss_S, np.arange(len(loss_S))))
    rise, error = 0.0, math.inf
    free = len(tail_S) - len(set(of_S[-last:])) - 1
    if free > 0 and len(tail_S) == last:
        line = stats.linregress(place_S, tail_S)
        stderr = line.stderr * ((last - 2) / free) ** 0.5  # the means of the data sets were estimated, too
        rise, error = line.slope * last, stats.t.ppf(0.975, free) * stderr * last
    gates = [
        at_most(f"{name}: loss at the end, below its start", end, start),
        at_most(f"{name}: loss at the end, below its base rate", raw_S[-few:].mean(), guess_S[-few:].mean()),
        at_most(f"{name}: rise over the last third, within its error", rise, error),
    ]
    return gates if error <= end / 3 else gates[:2]


def denoises(
    trained: Mapping[str, float], untrained: Mapping[str, float], causal: float, slope: float, *, beats: bool
) -> list[Gate]:
    """Whether a diffusion backbone uses the unmasked text, and learnt to: nats per masked token must rise
    with the share of masks, and at the fewest masks lie below those of the base made bidirectional.

    Args:
        trained, untrained: share of masks → nats per masked token, from the fewest masks to 1.
        causal: nats per token of the causal parent; slope: least rise in nats, fewest masks to all.
        beats: whether nats at the fewest masks must not exceed the parent's; for pretrained parents.
    """
    few, most = min(trained, key=float), max(trained, key=float)
    least = trained[few]
    found = [at_least(f"denoising slope, nats from t = {few} to {most}", trained[most] - least, slope)]
    found.append(at_most(f"nats at t = {few}, at most the untrained base's", least, untrained[few]))
    return found + ([at_most(f"nats at t = {few}, at most the causal parent's", least, causal)] * beats)


def above(name: str, scores: Scores, other: Scores, tasks: Sequence[Task], config: EvaluationConfig) -> Gate:
    """Whether a model finds more than another: the low end of the interval of the difference in nDCG@10, over
    all queries of the tasks that it was asked."""
    asked = [task for task in tasks if task.name in scores]
    return at_least(name, compare(scores, other, asked, config).interval[0], 0.0)


def above_chance(name: str, scores: Scores, tasks: Sequence[Task], config: EvaluationConfig) -> Gate:
    """Whether a model finds more than shuffled documents give, see `above`."""
    rng, asked = np.random.default_rng(0), [task for task in tasks if task.name in scores]
    shuffled = {task.name: ndcg(task, rng.random((len(task.queries), len(task.chunks)))) for task in asked}
    return above(f"{name}: nDCG@10 above that of shuffled documents", scores, shuffled, tasks, config)


def mean_gates(gates: Sequence[Gate]) -> list[Gate]:
    """Gates of several seeds as one each: the mean of its number against the mean of its bar."""
    means = []
    for name in dict.fromkeys(gate["name"] for gate in gates):
        values, signs, bars = zip(*((g["value"], *g["bar"].split()) for g in gates if g["name"] == name))
        judge = at_least if signs[0] == ">=" else at_most
        means.append(judge(name, np.mean(values), np.mean([float(bar) for bar in bars])))
    return means


def failed(gates: Sequence[Gate]) -> str:
    """The gates that did not pass, with their numbers; empty if all did."""
    # Each once, in their order.
    return "; ".join({f"{g['name']}: {g['value']:.3g}, not {g['bar']}": 0 for g in gates if not g["passed"]})


# Claims


@cache
def stated() -> dict[str, dict[str, Any]]:
    """What claims.yaml says: key → the claim, its source, the paper's figures, the bar, and its notebook."""
    written = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf8"))
    return {key: {"notebook": stage} | one for stage, some in written.items() for key, one in some.items()}


def judge(interval: tuple[float, float], *, above: float | None = None, below: float | None = None) -> str:
    """The verdict on "the true value lies above (or else: below) a bar", given its 95 % interval.

    "reproduced" if the whole interval lies on the claimed side, "contradicted" if the whole of it lies on
    the other one, "undecided" if the bar is inside.
    """
    low, high = interval if below is None else (-interval[1], -interval[0])
    bar = above if below is None else -below
    return "reproduced" if low > bar else "contradicted" if high < bar else "undecided"


def claim(
    study: Run, key: str, effect: Effect, *, detail: str = "", gates: Sequence[Gate] = (), **sizes: Any
) -> Line:
    """A claim that an effect lies above or below a bar, judged; a line of claims.json once it is kept.

    Args:
        study: the run; key: of the claim in claims.yaml.
        effect: this run's; detail: further figures of this run, as text.
        gates: of the trainings that it rests on; one that failed makes it "invalid".
        sizes: what the claim's text leaves open, for instance the number of dimensions.
    """
    bar = {side: bar for side, bar in stated()[key].items() if side in ("above", "below")}
    line = _line(key, **sizes) | {"detail": detail, "gates": list(gates), "bar": bar}
    line["seeds"] = [study.config.pair.seed]
    return line | _judged(line, effect) | {"replicates_B": effect.replicates_B}


def not_run(key: str, why: str = "") -> Line:
    """A claim that nothing here tests, and why."""
    ours = f"not run ({why or stated()[key]['why']})"
    return _line(key) | {"ours": ours, "verdict": "not run", "seeds": [], "notebook": ""}


def _line(key: str, **sizes: Any) -> Line:
    about = {"unit": "points", "headline": False} | stated()[key]
    blank = dict.fromkeys(("value", "interval", "bar", "p")) | dict.fromkeys(("ours", "effect", "detail"), "")
    told = {name: about[name] for name in ("source", "paper", "notebook", "unit", "headline")}
    text = about["claim"].format_map(defaultdict(lambda: "…", sizes))
    return blank | told | {"claim": text, "gates": [], "values": {}}


def _judged(line: Line, effect: Effect) -> Line:
    """What a claim says of an effect; "invalid" where a gate failed."""
    shown, passed = points(effect, line["unit"]), all(gate["passed"] for gate in line["gates"])
    verdict = judge(effect.interval, **line["bar"]) if passed else "invalid"
    ours = f"{shown}; {line['detail']}" if line["detail"] else shown
    told = {"ours": ours, "effect": shown, "verdict": verdict, "p": effect.chance(*line["bar"].values())}
    return told | {"value": effect.value, "interval": list(effect.interval)}


# What notebooks keep, and what several seeds say together


def keep(study: Run, claims: Sequence[Line]) -> list[Line]:
    """The claims as a notebook saves them; their resamples go to results/<run>/replicates/<stage>.npz.

    A resample is kept as its distance from the value in half precision, which is off by a few thousandths of
    the standard error at most.
    """
    tested = [one for one in claims if "replicates_B" in one]
    distances = {one["claim"]: (one["replicates_B"] - one["value"]).astype(np.float16) for one in tested}
    with replacing(_replicates(study)) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **distances)
    return [{key: value for key, value in one.items() if key != "replicates_B"} for one in claims]


def _replicates(study: Run) -> Path:
    return study.results / "replicates" / f"{study.notebook}.npz"


def _effect(study: Run, line: Line) -> Effect:
    """The effect of a claim that `keep` kept."""
    distances_B = np.load(_replicates(study))[line["claim"]]
    return Effect(line["value"], line["value"] + distances_B.astype(np.float64))


def runs(study: Run) -> dict[int, Run]:
    """This run, and those whose results lie beside its own that repeat it with other seeds, by seed: named
    <run>-seed<N>, and with the same corpus, see `left_out`."""
    others = {seed: run for seed, run in _repetitions(study).items() if not _apart(study, run, seed)}
    return dict(sorted((others | {study.config.pair.seed: study}).items()))


def left_out(study: Run) -> dict[str, str]:
    """Runs that are named as repetitions of this one but cannot be pooled, and notebooks of this and of the
    other runs whose numbers were made with other values of the preset or another corpus; each with why."""
    apart = {run.name: _apart(study, run, seed) for seed, run in _repetitions(study).items()}
    made = {run.name: _outdated(study, run) for run in runs(study).values()}
    otherwise = {f"{run}, {name}": why for run, row in made.items() for name, why in row.items()}
    return {name: why for name, why in apart.items() if why} | otherwise


def _repetitions(study: Run) -> dict[int, Run]:
    return {seed: replace(study, name=folder.name) for seed, folder in seed_runs(study.results).items()}


def _apart(study: Run, run: Run, seed: int) -> str:
    """Why a run cannot be pooled as this one with another seed; empty if it can."""
    preset = run.load("provenance").get("preset")
    if not preset:
        return "has no provenance.json: copy that, too"
    corpora = {one.load("00_backbone").get("corpus_hash") for one in (study, run)}
    trained = preset["pair"]["seed"]
    return "differs in corpus" * (len(corpora) > 1) or f"was trained with seed {trained}" * (trained != seed)


def _outdated(study: Run, run: Run) -> dict[str, str]:
    """Notebooks of a run that were not made as `study` would make them, and why. One that was run by hand has
    no record."""
    about, asked, reasons = run.load("provenance"), comparable(resolved(study.config)), {}
    stages = about.get("stages", {})
    for name, one in stages.items():
        made = comparable(about["preset"]) | one.get("otherwise", {})
        read = {key for key in made.keys() & asked.keys() if key.partition(".")[0] in one.get("reads", ())}
        changed = sorted(key for key in read if made[key] != asked[key])
        read_of = {row.get("data") for row in (one, stages.get("00_backbone", one))} - {"", None}
        changed += ["corpus"] * (len(read_of) > 1)
        if changed:
            reasons[name] = f"differs in {', '.join(changed[:5])}"
        elif one["exit_status"]:
            reasons[name] = "failed when it last ran"
    return reasons


def metrics(study: Run, needed: str = "00_backbone") -> dict[int, dict[str, dict[str, Any]]]:
    """What the notebooks of all `runs` saved, which each does when it ends: seed → notebook → metrics.

    Raises: ValueError if this run's notebook `needed` was not run, failed, or was made with other values or
        another corpus.
    """
    found = {}
    for seed, run in runs(study).items():
        left_out = {run.notebook, *_outdated(study, run)}
        names = {path.stem for path in run.results.glob("[0-9]*.json")} - left_out
        found[seed] = {name: run.load(name) for name in sorted(names)}
    if needed not in found[study.config.pair.seed]:
        why = _outdated(study, study).get(needed, "was not run")
        command = f"unmask run --preset {study.config.name} --run {study.name}"
        raise ValueError(f"notebook {needed} of run {study.name!r} {why}: `{command}`, with your --set")
    return found


def first_seeds(by_seed: Mapping[int, Mapping[str, Any]]) -> dict[str, int]:
    """The first seed that has each notebook, in the notebooks' order."""
    return dict(sorted({name: seed for seed in reversed(by_seed) for name in by_seed[seed]}.items()))


def pooled(study: Run) -> list[Line]:
    """The claims of all notebooks, in their order, each over the seeds at hand that have it (see `metrics`).

    An effect is averaged over the seeds that tested it and judged anew (see `pool`).

    Raises: FileNotFoundError if the resamples of a notebook are missing.
    """
    every, by_seed, claims = runs(study), metrics(study), []
    for stage in sorted({stage for saved in by_seed.values() for stage in saved}):
        rows = {seed: saved[stage].get("claims", ()) for seed, saved in by_seed.items() if stage in saved}
        for one in next(iter(rows.values())):
            same = {seed: line for seed, row in rows.items() for line in row if line["claim"] == one["claim"]}
            tested = {seed: line for seed, line in same.items() if line["value"] is not None}
            at = {seed: replace(every[seed], notebook=stage) for seed in tested}
            claims.append(_over_seeds(tested, at) if tested else one)
    return claims


def corrected(claims: Sequence[Line]) -> list[Line]:
    """The claims after Holm's correction: of so many headline claims tested, one or another would hold by
    chance.

    In ascending order of p, the k-th of m must have p ≤ 0.05 / (m − k + 1); from the first that fails on, all
    are "undecided". Invalid claims do not count.
    """
    valid = [one for one in claims if one["p"] is not None and one["verdict"] != "invalid"]
    tested = sorted((one for one in valid if one["headline"]), key=lambda one: one["p"])
    held, lost = True, {}
    for number, one in enumerate(tested):
        held = held and one["p"] * (len(tested) - number) <= 0.05
        if not held and one["verdict"] != "undecided":
            why = f"p = {one['p']:.3f}, too large for Holm's correction over {len(tested)} headline claims"
            lost[one["claim"]] = {"verdict": "undecided", "lost_to": "Holm", "ours": f"{one['ours']}; {why}"}
    return [one | lost.get(one["claim"], {}) for one in claims]


def _over_seeds(same: Mapping[int, Line], at: Mapping[int, Run]) -> Line:
    """A claim's lines by seed as one; they were kept at these runs."""
    effect = pool([_effect(at[seed], line) for seed, line in same.items()])
    line, *others = same.values()
    if others:
        said = [line["detail"] for line in same.values()]
        told = said[0] if len(set(said)) == 1 else "; ".join(f"seed {s}: {t}" for s, t in zip(same, said))
        values = {str(seed): other["value"] for seed, other in same.items()}
        line = line | {"detail": told, "seeds": list(same), "values": values}
        line["gates"] = mean_gates([gate for other in same.values() for gate in other["gates"]])
    return line | _judged(line, effect)


def gathered(tables: Iterable[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Tables of several seeds as one: row → column → the value of each seed that has one."""
    values: dict[str, dict[str, list[float]]] = {}
    for name, row in ((name, row) for table in tables for name, row in table.items()):
        for column, value in row.items():
            values.setdefault(name, {}).setdefault(column, []).append(value)
    return values
