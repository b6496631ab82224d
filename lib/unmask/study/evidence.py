"""Claims and what they rest on: effects with intervals over queries and seeds, gates of trainings, verdicts.

An effect is a number with the values that it takes when the queries are drawn anew. Every run asks the same
queries, and one fixed stream draws them: resample b holds the same queries for every system and every seed.
So effects of the same queries can be subtracted, divided and compared resample by resample, and averaged over
seeds.

A training that fails its own purpose says nothing about the paper: a claim that rests on it is "invalid",
neither "contradicted" nor "not at this scale". A gate is a number, its bar, and whether it passed; notebooks
keep their gates beside their metrics, claims carry those that they rest on.

What is claimed, by whom and with which bar stands in claims.yaml and nowhere else.

Shape suffixes: N queries · B resamples · S seeds, in `learnt` steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from scipy import stats

from unmask.config import ContextualConfig, EvaluationConfig, resolved
from unmask.evaluation.metrics import retrieval_metrics
from unmask.run import seed_runs
from unmask.store import artifacts_root, replacing, repository, write_atomic

if TYPE_CHECKING:
    from unmask.evaluation.tasks import Task
    from unmask.run import Run

VERDICTS = ("reproduced", "not at this scale", "contradicted", "invalid", "not run")
NOTHING = 1e-3  # a score below it found nothing, and has no shares
ENOUGH = 3  # seeds that results are committed for
Gate = dict[str, Any]
Values = Sequence[float] | np.ndarray
Scores = Mapping[str, np.ndarray]  # task → a metric per query


# Effects


@dataclass(frozen=True, eq=False)
class Effect:
    """A number that was computed from queries, and the same of each resample of the queries.

    Effects of the same queries can be combined: the difference, the share and the lowest of several are
    computed in every resample, so that their intervals are right, too.

    Example:
        >>> ours, other = bootstrap([0.9, 0.8, 0.7, 0.9], 1000), bootstrap([0.5, 0.6, 0.6, 0.6], 1000)
        >>> gain = ours - other
        >>> low, high = gain.interval
        >>> f"{gain.value:.2f} {0 < low < gain.value < high}"
        '0.25 True'
    """

    value: float
    replicates_B: np.ndarray

    @property
    def interval(self) -> tuple[float, float]:
        """95 %: the 2.5 % and the 97.5 % quantile of the resamples."""
        low, high = np.quantile(self.replicates_B, [0.025, 0.975])
        return float(low), float(high)

    def __iter__(self) -> Iterator[float]:
        """value, low, high."""
        return iter((self.value, *self.interval))

    def __sub__(self, other: Effect) -> Effect:
        return Effect(self.value - other.value, self.replicates_B - other.replicates_B)

    def share_of(self, whole: Effect) -> Effect:
        """This as a share of a score; a score below 0.001 counts as 0.001."""
        replicates_B = self.replicates_B / np.maximum(whole.replicates_B, NOTHING)
        return Effect(self.value / max(whole.value, NOTHING), replicates_B)


def bootstrap(values_N: Values, samples: int) -> Effect:
    """The mean over queries, by resampling queries.

    Args:
        values_N: a metric per query; NaN where a run has no value for a query that other seeds may have.
        samples: number of resamples.

    Raises: ValueError if there is no value.
    """
    values_N = np.asarray(values_N, dtype=np.float64)
    missing = np.isnan(values_N)
    if values_N.ndim != 1 or missing.all():
        raise ValueError(f"an effect needs a value per query; got {values_N.shape}, {missing.sum()} missing")
    mean = np.nanmean if missing.any() else np.mean
    generator = np.random.default_rng(0)  # one stream for all, see the top of this file
    replicates = [mean(generator.choice(values_N, len(values_N))) for _ in range(samples)]
    return Effect(float(mean(values_N)), np.array(replicates))


def paired_bootstrap(a_N: Values, b_N: Values, samples: int) -> Effect:
    """Mean of a − b over the same queries, by resampling queries.

    Args:
        a_N, b_N: a metric per query of two systems, aligned (`retrieval_metrics(..., per_query=True)`).
        samples: number of resamples.

    Raises: ValueError if the two differ in length or are empty.
    """
    a_N, b_N = np.asarray(a_N, dtype=np.float64), np.asarray(b_N, dtype=np.float64)
    if a_N.shape != b_N.shape:
        raise ValueError(f"systems are compared on the same queries; got {a_N.shape} and {b_N.shape} values")
    return bootstrap(a_N - b_N, samples)


def compare(ours: Scores, other: Scores, names: Iterable[str], config: EvaluationConfig) -> Effect:
    """How much better `ours` is than `other`: mean difference over all queries of the named tasks."""
    names = list(names)
    a_N, b_N = (np.concatenate([scores[name] for name in names]) for scores in (ours, other))
    return paired_bootstrap(a_N, b_N, config.bootstrap)


def lowest(effects: Sequence[Effect]) -> Effect:
    """The least of several effects: in each resample that of the resample."""
    return Effect(min(e.value for e in effects), np.min([e.replicates_B for e in effects], axis=0))


def highest(effects: Sequence[Effect]) -> Effect:
    """The largest of several effects: in each resample that of the resample."""
    return Effect(max(e.value for e in effects), np.max([e.replicates_B for e in effects], axis=0))


def pool(effects: Sequence[Effect]) -> Effect:
    """One effect of several seeds: its mean, by resampling queries and seeds (a crossed bootstrap).

    In resample b, seeds s₁ … s_S are drawn with replacement, and the replicate is the mean of their own
    replicates b, which all hold the same queries: r_b = 1/S · Σ_i r[s_i, b]. One seed changes nothing.
    """
    replicates_SB = np.stack([effect.replicates_B for effect in effects])
    seeds, samples = replicates_SB.shape
    drawn_SB = np.random.default_rng(1).integers(seeds, size=(seeds, samples))
    value = float(np.mean([effect.value for effect in effects]))
    return Effect(value, np.take_along_axis(replicates_SB, drawn_SB, axis=0).mean(axis=0))


def points(effect: Effect, unit: str = "points") -> str:
    """An effect with its interval: "+12.3 [+10.1, +14.6] points", which are hundredths, or in another unit as
    it is: "-0.345 [-0.400, -0.286] nats"."""
    value, low, high = (in_unit(number, unit) for number in effect)
    return f"{value} [{low}, {high}] {unit}"


def in_unit(number: float, unit: str) -> str:
    """A difference without its unit: in points, which are hundredths, "+12.3"; in another one "-0.345"."""
    return f"{100 * number:+.1f}" if unit == "points" else f"{number:+.3f}"


def prediction_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where one more seed's value falls with 95 %: mean ± t · s · √(1 + 1/n), n − 1 degrees of freedom, of
    two values or more."""
    count = len(values)
    half = stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) * math.sqrt(1 + 1 / count)
    return float(np.mean(values) - half), float(np.mean(values) + half)


# Gates


def at_least(name: str, value: float, bar: float) -> Gate:
    """A gate that a value passes from the bar on."""
    return {"name": name, "value": float(value), "bar": f">= {bar:.3g}", "passed": bool(value >= bar)}


def at_most(name: str, value: float, bar: float) -> Gate:
    """A gate that a value passes up to the bar."""
    return {"name": name, "value": float(value), "bar": f"<= {bar:.3g}", "passed": bool(value <= bar)}


def learnt(name: str, curve: Sequence[Mapping[str, Any]], base_rate: float) -> list[Gate]:
    """Whether a training's loss fell: below its start, below its base rate, and did not rise at the end.

    Losses of different data sets are not comparable, so each is taken as its distance from the mean of its
    data set. Start and end are the first and the last tenth of the steps, three at least. A rise is the slope
    over the last third of the steps times their number; it counts if its 95 % interval lies above 0.

    Args:
        name: of the training; curve: its logged steps, with "loss" and perhaps "dataset".
        base_rate: nats of whoever knows only how many answers there are, or how frequent each is.
    """
    loss_S = np.array([row["loss"] for row in curve])
    of_S, mean = np.array([row.get("dataset", "") for row in curve]), loss_S.mean()
    for dataset in np.unique(of_S):
        loss_S[of_S == dataset] -= loss_S[of_S == dataset].mean()
    loss_S += mean
    few = min(len(loss_S), max(3, len(loss_S) // 10))
    start, end = loss_S[:few].mean(), loss_S[-few:].mean()
    rise, error = _rise(loss_S[-max(4, len(loss_S) // 3) :])
    return [
        at_most(f"{name}: loss at the end, below its start", end, start),
        at_most(f"{name}: loss at the end, below its base rate", end, base_rate),
        at_most(f"{name}: rise over the last third, within its error", rise, error),
    ]


def _rise(loss_S: np.ndarray) -> tuple[float, float]:
    """Slope of a straight line times the number of steps, and half its 95 % interval."""
    if (steps := len(loss_S)) < 4:
        return 0.0, 0.0
    line = stats.linregress(np.arange(steps), loss_S)
    return line.slope * steps, stats.t.ppf(0.975, steps - 2) * line.stderr * steps


def contextual_guess(stage: ContextualConfig) -> float:
    """Nats of a guess at the end of the contextual stage: among the chunks of a document (weight alpha) and
    of the batch; and, unless it is InSeNT, among the documents of the batch (weight beta)."""
    own, batch, documents = (math.log(n) for n in (stage.chunks, stage.batch * stage.chunks, stage.batch))
    local = stage.alpha * own + (1 - stage.alpha) * batch
    return local if stage.objective == "insent" else stage.beta_end * documents + (1 - stage.beta_end) * local


def denoises(masked_nats: Mapping[str, float], causal: float, slope: float, *, beats: bool) -> list[Gate]:
    """Whether a diffusion backbone uses the text that is left: nats per masked token must rise with the share
    of masks.

    Args:
        masked_nats: share of masks → nats per masked token, from the fewest masks to 1.
        causal: nats per token of the causal parent; slope: nats that the right end must lie above the left.
        beats: whether the left end must come down to the parent's, as a pretrained parent allows.
    """
    shares = sorted(masked_nats, key=float)
    least, most = masked_nats[shares[0]], masked_nats[shares[-1]]
    found = [at_least(f"denoising slope, nats from t = {shares[0]} to {shares[-1]}", most - least, slope)]
    return found + ([at_most(f"nats at t = {shares[0]}, at most the causal parent's", least, causal)] * beats)


def above_chance(name: str, scores: Scores, tasks: Sequence[Task], config: EvaluationConfig) -> Gate:
    """Whether a model finds more than shuffled documents give: the low end of the interval of the difference
    in nDCG@10, over all queries."""
    rng, shuffled = np.random.default_rng(0), {}
    for task in (task for task in tasks if task.name in scores):
        random_NM = rng.random((len(task.queries), len(task.chunks)))
        shuffled[task.name] = retrieval_metrics(random_NM, task.relevant, per_query=True)["ndcg@10"]
    low, _ = compare(scores, shuffled, shuffled, config).interval
    return at_least(f"{name}: nDCG@10 above that of shuffled documents", low, 0.0)


def failed(gates: Sequence[Gate]) -> str:
    """The gates that did not pass, with their numbers; empty if all did."""
    return "; ".join(f"{g['name']}: {g['value']:.3g}, not {g['bar']}" for g in gates if not g["passed"])


# Claims


@cache
def stated() -> dict[str, dict[str, Any]]:
    """What claims.yaml says: key → the claim, its source, the paper's figures, the bar, and its notebook."""
    written = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf8"))
    return {key: {"notebook": stage} | one for stage, some in written.items() for key, one in some.items()}


def judge(interval: tuple[float, float], *, above: float | None = None, below: float | None = None) -> str:
    """The verdict on "the true value lies above (or else: below) a bar", given its 95 % interval.

    "reproduced" if the whole interval lies on the claimed side, "contradicted" if the whole of it lies on
    the other one, "not at this scale" if the bar is inside.
    """
    low, high = interval if below is None else (-interval[1], -interval[0])
    bar = above if below is None else -below
    return "reproduced" if low > bar else "contradicted" if high < bar else "not at this scale"


def claim(
    study: Run, key: str, effect: Effect, *, detail: str = "", gates: Sequence[Gate] = (),
    seeds: Sequence[int] = (), **sizes: Any,
) -> dict[str, Any]:  # fmt: skip
    """A claim that an effect lies above or below a bar, judged; a line of claims.json once it is kept.

    Args:
        study: the run; key: of the claim in claims.yaml.
        effect: this run's; detail: further figures of this run, as text.
        gates: of the trainings that it rests on; one that failed makes it "invalid".
        seeds: that the effect is the mean of; default: the run's.
        sizes: what the claim's text leaves open, for instance the number of dimensions.
    """
    about = stated()[key]
    bar = {side: about[side] for side in ("above", "below") if side in about}
    seeds = list(seeds or [study.config.pair.seed])
    line = _line(key, **sizes) | {"seeds": seeds, "gates": list(gates), "bar": bar}
    line |= {"detail": detail, "unit": about.get("unit", "points"), "replicates_B": effect.replicates_B}
    return line | _judged(line, effect) | {"values": {str(seed): effect.value for seed in seeds}}


def fact(
    study: Run, key: str, *, ours: str, holds: bool, seeds: Sequence[int] | None = None
) -> dict[str, Any]:
    """A claim that holds or does not: arithmetic (of no seed), equality, a time."""
    seeds = [study.config.pair.seed] if seeds is None else list(seeds)
    verdict = "reproduced" if holds else "contradicted"
    return _line(key) | {"ours": ours, "verdict": verdict, "seeds": seeds}


def not_run(key: str, why: str = "") -> dict[str, Any]:
    """A claim that nothing here tests, and why."""
    why = why or stated()[key]["why"]
    return _line(key) | {"ours": f"not run ({why})", "verdict": "not run", "notebook": ""}


def _line(key: str, **sizes: Any) -> dict[str, Any]:
    about = stated()[key]
    line = {key: about[key] for key in ("claim", "source", "paper", "notebook")}
    line["claim"] = line["claim"].format(**sizes)
    line |= dict.fromkeys(("ours", "effect", "detail", "unit", "verdict"), "")
    line |= {"value": None, "interval": None, "bar": None, "headline": about.get("headline", False)}
    return line | {"gates": [], "seeds": [], "values": {}}


def _judged(line: Mapping[str, Any], effect: Effect) -> dict[str, Any]:
    """What a claim says of an effect; "invalid" where a gate failed."""
    shown, passed = points(effect, line["unit"]), all(gate["passed"] for gate in line["gates"])
    return {
        "ours": f"{shown}; {line['detail']}" if line["detail"] else shown,
        "effect": shown,
        "value": effect.value,
        "interval": list(effect.interval),
        "verdict": judge(effect.interval, **line["bar"]) if passed else "invalid",
    }


# What notebooks keep, and what several seeds say together


def keep(study: Run, claims: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The claims as a notebook saves them; their resamples go to results/<run>/replicates/<stage>.npz."""
    made = {str(n): one for n, one in enumerate(claims) if "replicates_B" in one}
    _write(_replicates(study), {n: Effect(one["value"], one["replicates_B"]) for n, one in made.items()})
    return [{key: value for key, value in one.items() if key != "replicates_B"} for one in claims]


def keep_effects(study: Run, name: str, effects: Mapping[str, Effect]) -> dict[str, list[float]]:
    """Effects that are no claims as a notebook saves them under `name`: value, low and high; their resamples
    go to results/<run>/replicates/<stage>-<name>.npz."""
    _write(_replicates(study, name), effects)
    return {key: list(effect) for key, effect in effects.items()}


def pooled_effects(study: Run, stage: str, name: str) -> dict[str, Effect]:
    """What `keep_effects` kept in one notebook, each over all seeds at hand; see `pool`.

    Raises: FileNotFoundError if the resamples of a run are missing.
    """
    every, found = runs(study), {}
    for seed, saved in metrics(study).items():
        values = {key: value for key, (value, *_) in saved.get(stage, {}).get(name, {}).items()}
        for key, effect in _read(replace(every[seed], stage=stage), values, name).items():
            found.setdefault(key, []).append(effect)
    return {key: pool(effects) for key, effects in found.items()}


def _replicates(study: Run, name: str = "") -> Path:
    return study.results / "replicates" / ("-".join(filter(None, (study.stage, name))) + ".npz")


def _write(path: Path, effects: Mapping[str, Effect]) -> None:
    """Each resample as its distance from the value in half precision, which is off by a few thousandths of
    the standard error at most."""
    distances = {key: (e.replicates_B - e.value).astype(np.float16) for key, e in effects.items()}
    with replacing(path) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **distances)


def _read(study: Run, values: Mapping[str, float], name: str = "") -> dict[str, Effect]:
    """What `_write` wrote, for these values."""
    path = _replicates(study, name)
    if values and not path.is_file():
        raise FileNotFoundError(f"{path} is missing: run notebook {study.stage} of run {study.name!r} again")
    distances = np.load(path) if values else {}
    return {key: Effect(value, value + distances[key].astype(np.float64)) for key, value in values.items()}


def runs(study: Run) -> dict[int, Run]:
    """This run, and those that repeat it with other seeds on this machine, by seed.

    These are named <run>-seed<N>, with the same preset but for the seeds and the same corpus; see `left_out`.
    """
    own, excluded = study.config.pair.seed, left_out(study)
    names = {seed: folder.name for seed, folder in _repetitions(study).items() if seed != own}
    return {own: study} | {s: replace(study, name=name) for s, name in names.items() if name not in excluded}


def left_out(study: Run) -> dict[str, str]:
    """Runs that are named as repetitions of this one with other seeds but cannot be pooled, and why."""
    ours, reasons = _about(study), {}
    for folder in _repetitions(study).values():
        theirs = _about(replace(study, name=folder.name), saved=True)
        if changed := _changed(_compared(ours), _compared(theirs)):
            known = "preset" in theirs
            reasons[folder.name] = f"differs in {', '.join(changed)}" if known else "has no provenance.json"
    return reasons


def metrics(study: Run) -> dict[int, dict[str, dict[str, Any]]]:
    """What the notebooks of all `runs` saved: seed → notebook → metrics. Of repetitions those count that are
    done."""
    found, folders = {}, _repetitions(study)
    for seed, run in runs(study).items():
        stages = sorted(path.stem for path in run.results.glob("[0-9]*.json") if path.stem != run.stage)
        done = {path.parent.name for path in folders[seed].glob("*/done.json")} if seed in folders else stages
        found[seed] = {stage: run.load(stage) for stage in stages if stage in done}
    return found


def pooled(study: Run) -> list[dict[str, Any]]:
    """The claims of this run's notebooks, in their order, each over all seeds at hand (see `metrics`).

    An effect is averaged over seeds and judged anew (see `pool`). What holds or does not must do so with
    every seed, or is "not at this scale".

    Raises: FileNotFoundError if the resamples of a notebook are missing.
    """
    every, by_seed, claims = runs(study), metrics(study), []
    for stage, values in by_seed[study.config.pair.seed].items():
        rows = {seed: saved[stage]["claims"] for seed, saved in by_seed.items() if stage in saved}
        effects: dict[int, dict[str, Effect]] = {}
        for seed, row in rows.items() if len(rows) > 1 else ():
            made = {str(n): one for n, one in enumerate(row) if one["value"] is not None}
            read = _read(replace(every[seed], stage=stage), {n: one["value"] for n, one in made.items()})
            effects[seed] = {made[n]["claim"]: effect for n, effect in read.items()}
        for one in values.get("claims", ()):
            same = {seed: c for seed, row in sorted(rows.items()) for c in row if c["claim"] == one["claim"]}
            claims.append(_pooled(one, same, effects) if len(rows) > 1 else one)
    return claims


def _pooled(
    one: dict[str, Any], same: Mapping[int, Mapping[str, Any]], effects: Mapping[int, Mapping[str, Effect]]
) -> dict[str, Any]:
    """A claim over seeds: `same` are its lines by seed, in their order."""
    if one["value"] is None:
        alike = len({other["verdict"] for other in same.values()}) == 1
        told = {other["ours"] for other in same.values()}
        ours = one["ours"] if len(told) == 1 else "; ".join(f"seed {s}: {o['ours']}" for s, o in same.items())
        verdict = one["verdict"] if alike else "not at this scale"
        return one | {"ours": ours, "verdict": verdict, "seeds": list(same) if one["seeds"] else []}
    own = {seed: effects[seed][one["claim"]] for seed in same}
    named = [(f"seed {seed}, ", gate) for seed, other in same.items() for gate in other.get("gates", ())]
    alike = len({other["detail"] for other in same.values()}) == 1
    detail = one["detail"] if alike else f"seed {one['seeds'][0]}: {one['detail']}"
    line = one | {"gates": [gate | {"name": seed + gate["name"]} for seed, gate in named]}
    line |= _judged(line | {"detail": detail}, pool(list(own.values())))
    return line | {"seeds": list(same), "values": {str(seed): effect.value for seed, effect in own.items()}}


def commit_seeds(study: Run, tables: Mapping[int, Mapping[str, Mapping[str, float]]]) -> Path | None:
    """Writes results/seeds/<preset>.json, which other machines' runs are compared with.

    Args:
        tables: seed → model → family of tasks → nDCG@10; kept is what all seeds have.
    Returns: the file; None, and nothing is written, for fewer than three seeds or a run of another name.
    """
    if len(tables) < ENOUGH or study.name != study.config.name:
        return None
    every = [tables[seed] for seed in sorted(tables)]
    values: dict[str, dict[str, list[float]]] = {}
    for model, family in ((model, family) for model, row in every[0].items() for family in row):
        if all(family in table.get(model, {}) for table in every):
            values.setdefault(model, {})[family] = [table[model][family] for table in every]
    about = _about(study)
    kept = {key: about.get(key) for key in ("corpus_hash", "commit", "versions", "hardware", "preset")}
    document = {"seeds": sorted(tables)} | kept | {"values": values}
    return write_atomic(_committed(study), json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def against_committed(study: Run, table: Mapping[str, Mapping[str, float]]) -> dict[str, Any] | None:
    """This run beside the committed seeds of its preset.

    Args:
        table: model → family of tasks → nDCG@10 of this run.
    Returns: None where there are none, or where this run has as many seeds itself; else
        {"rows": [{"model", "family", "ours", "mean", "low", "high", "n", "inside"}],
         "differs": {"corpus" | "commit" | "section.key" | package: (ours, committed)}},
        with the mean of the committed seeds and their `prediction_interval` from low to high; "ours" and
        "inside" are None where this run has no such number.
    """
    if not _committed(study).is_file() or len(runs(study)) >= ENOUGH:
        return None
    committed, ours = json.loads(_committed(study).read_text(encoding="utf8")), _about(study)
    told = [_compared(one) | {"commit": one.get("commit")} | one["versions"] for one in (ours, committed)]
    rows = []
    for model, family in ((model, family) for model, row in committed["values"].items() for family in row):
        values, value = committed["values"][model][family], table.get(model, {}).get(family)
        low, high = prediction_interval(values)
        # A number that no seed changes (BM25's) has an interval without width.
        inside = None if value is None else low - 1e-6 <= value <= high + 1e-6
        row = {"model": model, "family": family, "ours": value, "mean": float(np.mean(values))}
        rows.append(row | {"low": low, "high": high, "n": len(values), "inside": inside})
    return {"rows": rows, "differs": _changed(*told)}


def _repetitions(study: Run) -> dict[int, Path]:
    return seed_runs(artifacts_root() / study.name)


def _committed(study: Run) -> Path:
    return repository() / "results" / "seeds" / f"{study.config.name}.json"


def _about(study: Run, *, saved: bool = False) -> dict[str, Any]:
    """What a run was made with: its provenance, with the corpus of its own first notebook and, unless the
    `saved` one is asked for, the preset as it is now."""
    corpus = (study.load("00_backbone") or {}).get("corpus_hash")
    about = {"versions": {}} | (study.load("provenance") or {}) | {"corpus_hash": corpus}
    return about if saved else about | {"preset": resolved(study.config)}


def _compared(about: Mapping[str, Any]) -> dict[str, Any]:
    """What runs must share to be pooled: the corpus and the preset, seeds and processes aside."""
    sections = {name: row for name, row in about.get("preset", {}).items() if isinstance(row, dict)}
    return {"corpus": about["corpus_hash"]} | {
        f"{section}.{key}": value
        for section, row in sections.items()
        for key, value in row.items()
        if section != "parallel" and key != "seed"
    }


def _changed(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    both = {key: (first.get(key), second.get(key)) for key in dict.fromkeys([*first, *second])}
    return {key: (one, other) for key, (one, other) in both.items() if one != other}
