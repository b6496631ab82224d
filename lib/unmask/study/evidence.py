"""Claims and what they rest on: effects with intervals over queries and seeds, verdicts, committed results.

An effect is a number with the values that it takes when the queries are drawn anew. Every run asks the same
queries, and one fixed stream draws them: resample b holds the same queries for every system and every seed.
So effects of the same queries can be subtracted, divided and compared resample by resample, and averaged over
seeds.

Shape suffixes: N queries · B resamples · S seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from unmask.config import resolved
from unmask.run import seed_runs
from unmask.store import artifacts_root, replacing, repository, write_atomic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from unmask.run import Run

VERDICTS = ("reproduced", "not at this scale", "contradicted", "invalid", "not run")
NOTHING = 1e-3  # a score below it found nothing, and has no shares
ENOUGH = 3  # seeds that results are committed for


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


def bootstrap(values_N: Sequence[float] | np.ndarray, samples: int) -> Effect:
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


def paired_bootstrap(
    a_N: Sequence[float] | np.ndarray, b_N: Sequence[float] | np.ndarray, samples: int
) -> Effect:
    """Mean of a − b over the same queries, by resampling queries.

    Args:
        a_N, b_N: a metric per query of two systems, aligned (`retrieval_metrics(..., per_query=True)`).
        samples: number of resamples.

    Raises: ValueError if the two differ in length or are empty.
    """
    a_N, b_N = np.asarray(a_N, dtype=np.float64), np.asarray(b_N, dtype=np.float64)
    if a_N.shape != b_N.shape:
        raise ValueError(
            f"paired_bootstrap compares systems on the same queries; got {a_N.shape} and {b_N.shape} values."
        )
    return bootstrap(a_N - b_N, samples)


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


def judge(interval: tuple[float, float], *, above: float | None = None, below: float | None = None) -> str:
    """The verdict on "the true value lies above (below) a bar", given its 95 % interval.

    "reproduced" if the whole interval lies on the claimed side, "contradicted" if the whole of it lies on
    the other one, "not at this scale" if the bar is inside.

    Raises: ValueError unless the bar has one side.
    """
    if (above is None) == (below is None):
        raise ValueError("say either above= or below=")
    low, high = interval if below is None else (-interval[1], -interval[0])
    bar = above if below is None else -below
    return "reproduced" if low > bar else "contradicted" if high < bar else "not at this scale"


def claim(
    text: str, *, source: str, paper: str, effect: Effect, seeds: Sequence[int], notebook: str,
    above: float | None = None, below: float | None = None, detail: str = "", unit: str = "points",
    headline: bool = False, gates: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:  # fmt: skip
    """A claim that an effect lies above or below a bar, judged; a line of claims.json once it is kept.

    Args:
        text: the claim in one sentence; source: where the paper makes it; paper: its figures, as text.
        above, below: the bar, one of the two.
        detail: further figures of this run, as text; unit: of the effect, "points" or "nats".
        headline: whether the report names it first.
        gates: of the trainings that it rests on (`unmask.study.gates`); one that failed makes it "invalid".
    Raises: ValueError unless the bar has one side.
    """
    bar = {side: value for side, value in (("above", above), ("below", below)) if value is not None}
    verdict, shown = _valid(judge(effect.interval, **bar), gates), points(effect, unit)
    line = _line(text, source, paper, f"{shown}; {detail}" if detail else shown, verdict, seeds, notebook)
    values = {str(seed): effect.value for seed in seeds}
    measured = {"effect": shown, "value": effect.value, "interval": list(effect.interval), "bar": bar}
    about = {"detail": detail, "unit": unit, "headline": headline, "values": values, "gates": list(gates)}
    return line | measured | about | {"replicates_B": effect.replicates_B}


def _valid(verdict: str, gates: Sequence[Mapping[str, Any]]) -> str:
    return verdict if all(gate["passed"] for gate in gates) else "invalid"


def fact(
    text: str, *, source: str, paper: str, ours: str, holds: bool, seeds: Sequence[int], notebook: str,
    headline: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """A claim that holds or does not: arithmetic, equality, a time."""
    verdict = "reproduced" if holds else "contradicted"
    return _line(text, source, paper, ours, verdict, seeds, notebook) | {"headline": headline}


def not_run(text: str, *, source: str, paper: str, why: str) -> dict[str, Any]:
    """A claim that nothing here tests, and why."""
    return _line(text, source, paper, f"not run ({why})", "not run", (), "")


def _line(
    text: str, source: str, paper: str, ours: str, verdict: str, seeds: Sequence[int], notebook: str
) -> dict[str, Any]:
    line = {"claim": text, "source": source, "paper": paper, "ours": ours, "effect": "", "detail": ""}
    line |= {"value": None, "interval": None, "bar": None, "unit": "", "headline": False}
    line |= {"gates": []}
    return line | {"seeds": list(seeds), "values": {}, "verdict": verdict, "notebook": notebook}


def keep(study: Run, claims: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The claims as a notebook saves them; their resamples go to results/<run>/replicates/<stage>.npz."""
    measured = {
        str(number): Effect(one["value"], one["replicates_B"])
        for number, one in enumerate(claims)
        if "replicates_B" in one
    }
    _write(_replicates(study, study.stage), measured)
    return [{key: value for key, value in one.items() if key != "replicates_B"} for one in claims]


def keep_effects(study: Run, name: str, effects: Mapping[str, Effect]) -> dict[str, list[float]]:
    """Effects that are no claims as a notebook saves them under `name`: value, low and high; their resamples
    go to results/<run>/replicates/<stage>-<name>.npz."""
    _write(_replicates(study, study.stage, name), effects)
    return {key: list(effect) for key, effect in effects.items()}


def pooled_effects(study: Run, stage: str, name: str) -> dict[str, Effect]:
    """What `keep_effects` kept in one notebook, each over all seeds at hand; see `pool`.

    Raises: FileNotFoundError if the resamples of a run are missing.
    """
    every, found = runs(study), {}
    for seed, saved in metrics(study).items():
        effects = saved.get(stage, {}).get(name, {})
        values = {key: value for key, (value, *_) in effects.items()}
        for key, effect in _read(every[seed], stage, values, name).items():
            found.setdefault(key, []).append(effect)
    return {key: pool(effects) for key, effects in found.items()}


def _replicates(study: Run, stage: str, name: str = "") -> Path:
    return study.results / "replicates" / ("-".join(filter(None, (stage, name))) + ".npz")


def _write(path: Path, effects: Mapping[str, Effect]) -> None:
    """Each resample as its distance from the value in half precision, which is off by a few thousandths of
    the standard error at most."""
    distances = {key: (e.replicates_B - e.value).astype(np.float16) for key, e in effects.items()}
    with replacing(path) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **distances)


def _read(study: Run, stage: str, values: Mapping[str, float], name: str = "") -> dict[str, Effect]:
    """What `_write` wrote, for these values."""
    path = _replicates(study, stage, name)
    if values and not path.is_file():
        raise FileNotFoundError(f"{path} is missing: run notebook {stage} of run {study.name!r} again")
    distances = np.load(path) if values else {}
    return {key: Effect(value, value + distances[key].astype(np.float64)) for key, value in values.items()}


def _kept(study: Run, stage: str, claims: Sequence[Mapping[str, Any]]) -> dict[str, Effect]:
    """Effects of the claims that a notebook kept, by their text."""
    measured = {str(number): one for number, one in enumerate(claims) if one["value"] is not None}
    effects = _read(study, stage, {number: one["value"] for number, one in measured.items()})
    return {measured[number]["claim"]: effect for number, effect in effects.items()}


def runs(study: Run) -> dict[int, Run]:
    """This run, and those that repeat it with other seeds on this machine, by seed.

    These are named <run>-seed<N>, with the same preset but for the seeds and the same corpus; see `left_out`.
    """
    own, excluded = study.config.pair.seed, left_out(study)
    names = {seed: folder.name for seed, folder in _repetitions(study).items() if seed != own}
    return {own: study} | {s: replace(study, name=name) for s, name in names.items() if name not in excluded}


def left_out(study: Run) -> dict[str, str]:
    """Runs that are named as repetitions of this one with other seeds but cannot be pooled, and why."""
    ours, reasons = _about(study) | {"preset": resolved(study.config)}, {}
    for folder in _repetitions(study).values():
        theirs = _about(replace(study, name=folder.name))
        if changed := _differences(ours, theirs):
            known = "preset" in theirs
            reasons[folder.name] = f"differs in {', '.join(changed)}" if known else "has no provenance.json"
    return reasons


def metrics(study: Run) -> dict[int, dict[str, dict[str, Any]]]:
    """What the notebooks of all `runs` saved: seed → notebook → metrics. Of repetitions those count that are
    done."""
    found = {seed: _saved(one) for seed, one in runs(study).items()}
    for seed, folder in _repetitions(study).items():
        done = {path.parent.name for path in folder.glob("*/done.json")}
        if seed in found:
            found[seed] = {stage: values for stage, values in found[seed].items() if stage in done}
    return found


def _repetitions(study: Run) -> dict[int, Path]:
    return seed_runs(artifacts_root() / study.name)


def _saved(study: Run) -> dict[str, dict[str, Any]]:
    stages = sorted(path.stem for path in study.results.glob("[0-9]*.json") if path.stem != study.stage)
    return {stage: study.load(stage) for stage in stages}


def _about(study: Run) -> dict[str, Any]:
    """What a run was made with: its provenance, with the corpus of its own first notebook."""
    backbone = study.load("00_backbone") or {}
    return (study.load("provenance") or {}) | {"corpus_hash": backbone.get("corpus_hash")}


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Which values of the preset differ, seeds and processes aside, and whether the corpus does."""
    first, second = (
        {"corpus": one["corpus_hash"]}
        | {
            f"{section}.{key}": value
            for section, values in one.get("preset", {}).items()
            if isinstance(values, dict) and section != "parallel"
            for key, value in values.items()
            if key != "seed"
        }
        for one in (ours, theirs)
    )
    return _changed(first, second)


def _changed(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    both = {key: (first.get(key), second.get(key)) for key in dict.fromkeys([*first, *second])}
    return {key: (one, other) for key, (one, other) in both.items() if one != other}


def pooled(study: Run) -> list[dict[str, Any]]:
    """The claims of this run's notebooks, in their order, each over all seeds at hand (see `metrics`).

    An effect is averaged over seeds and judged anew (see `pool`). What holds or does not must do so with
    every seed, or is "not at this scale".

    Raises: FileNotFoundError if the resamples of a notebook are missing.
    """
    every, by_seed, claims = runs(study), metrics(study), []
    for stage, values in by_seed[study.config.pair.seed].items():
        rows = {seed: saved[stage]["claims"] for seed, saved in by_seed.items() if stage in saved}
        if len(rows) == 1:
            claims += values["claims"]
            continue
        effects = {seed: _kept(every[seed], stage, row) for seed, row in rows.items()}
        for one in values["claims"]:
            text = one["claim"]
            same = {seed: other for seed, row in rows.items() for other in row if other["claim"] == text}
            claims.append(_pooled(one, same, {seed: effects[seed].get(text) for seed in same}))
    return claims


def _pooled(
    one: dict[str, Any], same: Mapping[int, Mapping[str, Any]], effects: Mapping[int, Effect | None]
) -> dict[str, Any]:
    """A claim over seeds: `same` are its lines and `effects` its effects, by seed."""
    seeds = sorted(same)
    if one["value"] is None:
        verdicts = {other["verdict"] for other in same.values()}
        verdict = one["verdict"] if len(verdicts) == 1 else "not at this scale"
        told = {other["ours"] for other in same.values()}
        ours = one["ours"] if len(told) == 1 else "; ".join(f"seed {s}: {same[s]['ours']}" for s in seeds)
        return one | {"ours": ours, "verdict": verdict, "seeds": seeds if one["seeds"] else []}
    effect = pool([effects[seed] for seed in seeds])
    shown = points(effect, one["unit"])
    alike = len({other["detail"] for other in same.values()}) == 1
    detail = one["detail"] if alike else f"seed {one['seeds'][0]}: {one['detail']}"
    gates = [
        gate | {"name": f"seed {seed}, {gate['name']}"}
        for seed in seeds
        for gate in same[seed].get("gates", ())
    ]
    return one | {
        "gates": gates,
        "ours": f"{shown}; {detail}" if detail else shown,
        "effect": shown,
        "value": effect.value,
        "interval": list(effect.interval),
        "seeds": seeds,
        "values": {str(seed): effects[seed].value for seed in seeds},
        "verdict": _valid(judge(effect.interval, **one["bar"]), gates),
    }


def prediction_interval(values: Sequence[float]) -> tuple[float, float]:
    """Where one more seed's value falls with 95 %: mean ± t · s · √(1 + 1/n), n − 1 degrees of freedom.

    Raises: ValueError for fewer than two values.
    """
    if (count := len(values)) < 2:
        raise ValueError(f"a prediction needs the values of two seeds or more, got {count}")
    half = stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) * math.sqrt(1 + 1 / count)
    return float(np.mean(values) - half), float(np.mean(values) + half)


def commit_seeds(study: Run, tables: Mapping[int, Mapping[str, Mapping[str, float]]]) -> Path | None:
    """Writes results/seeds/<preset>.json, which other machines' runs are compared with.

    Args:
        tables: seed → model → family of tasks → nDCG@10; kept is what all seeds have.
    Returns: the file; None, and nothing is written, for fewer than three seeds or a run of another name.
    """
    if len(tables) < ENOUGH or study.name != study.config.name:
        return None
    seeds, about = sorted(tables), _about(study)
    values: dict[str, dict[str, list[float]]] = {}
    for model, row in tables[seeds[0]].items():
        for family in row:
            found = [tables[seed].get(model, {}).get(family) for seed in seeds]
            if None not in found:
                values.setdefault(model, {})[family] = found
    kept = {"corpus_hash": about["corpus_hash"], "commit": about.get("commit")}
    kept |= {"versions": about.get("versions", {}), "hardware": about.get("hardware")}
    document = {"seeds": seeds} | kept | {"preset": resolved(study.config), "values": values}
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    return write_atomic(_committed(study), text)


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
    committed = json.loads(_committed(study).read_text(encoding="utf8"))
    ours = _about(study) | {"preset": resolved(study.config)}
    differs = _differences(ours, committed)
    differs |= _changed({"commit": ours.get("commit")}, {"commit": committed["commit"]})
    differs |= _changed(ours.get("versions", {}), committed["versions"])
    rows = []
    for model, row in committed["values"].items():
        for family, values in row.items():
            value, (low, high) = table.get(model, {}).get(family), prediction_interval(values)
            # A number that no seed changes (BM25's) has an interval without width.
            inside = None if value is None else low - 1e-6 <= value <= high + 1e-6
            told = {"model": model, "family": family, "ours": value, "mean": float(np.mean(values))}
            rows.append(told | {"low": low, "high": high, "n": len(values), "inside": inside})
    return {"rows": rows, "differs": differs}


def _committed(study: Run) -> Path:
    return repository() / "results" / "seeds" / f"{study.config.name}.json"
