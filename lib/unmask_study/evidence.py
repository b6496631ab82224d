"""What the runs say of the claims: effects with intervals, gates of trainings, verdicts.

Every notebook keeps the score of each query, results/<run>/scores/<notebook>.npz. claims.yaml says which two
systems a claim compares, on which tasks, and on which trainings it rests. Notebook 12 computes all claims
from these files, over all seeds: a definition can be mended without training anew.

A training that fails its own purpose says nothing about the paper: a claim that rests on it is "invalid".
What a training must show is a gate, a number and its bar. Notebooks save their gates beside their metrics.

Shape suffixes: N queries · C documents that they ask for · S seeds, or in `learnt` steps.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import yaml
from scipy import stats

from unmask.config import resolved
from unmask.evaluation.tasks import Task, ndcg
from unmask.store import read_json, replacing
from unmask_study.run import Run, seed_runs
from unmask_study.settings import comparable

VERDICTS = ("holds", "does not hold", "open", "one run", "two runs", "invalid", "not asked", "not run")
Gate = dict[str, Any]
Line = dict[str, Any]  # what is said of a claim, as in claims.json
Scores = Mapping[str, np.ndarray]  # task → a metric per query


# Effects


class Effect(NamedTuple):
    """A mean difference and its 95 % interval."""

    value: float
    low: float
    high: float


def effect(gains: Sequence[Scores], documents: Mapping[str, Sequence[Any]]) -> Effect:
    """The mean over tasks of the mean over queries, with its interval over other documents and other seeds.

        e = 1/T · Σ_t 1/N_t · Σ_n g[t, n]
        error² = 1/T² · Σ_t (C_t − 1)/C_t · Σ_c (Σ_{n asks for c} (g[t, n] − ḡ[t]) / (N_t − N_c))²

    g is the mean over seeds of each query's gain. Queries that ask for one document succeed or fail together,
    so documents are what is drawn: c is one, and N_c of the queries ask for it (a cluster-robust standard
    error by the jackknife, which holds for few documents of unequal N_c). Its degrees of freedom are those of
    Welch and Satterthwaite, from C_t − 1 of each task. Other seeds add σ/√S with S − 1 degrees of freedom,
    where σ is the standard deviation of the seeds' effects. The interval holds 95 % of the sum of these two
    errors, each distributed as Student's t (Behrens and Fisher).

    Args:
        gains: of each seed the gain of each query, by task.
        documents: by task the document that each query asks for.

    Example:
        >>> gain = effect([{"docs": np.array([0.4, 0.3, 0.1, 0.3])}], {"docs": [0, 1, 2, 3]})
        >>> points(gain)
        '+27.5 [+7.5, +47.5] points'
    """
    variance, free = [], []
    for task, asked in documents.items():
        gain_N = np.mean([one[task] for one in gains], axis=0, dtype=np.float64)
        _, number_N = np.unique(asked, return_inverse=True)
        sum_C, rest_C = np.bincount(number_N, gain_N - gain_N.mean()), len(gain_N) - np.bincount(number_N)
        free.append(max(1, len(sum_C) - 1))
        # One document tells nothing of others: it counts as the most that gains within [-1, 1] can vary.
        spread = sum((sum_C / rest_C) ** 2) * free[-1] / len(sum_C) if len(sum_C) > 1 else 1.0
        variance.append(spread / len(documents) ** 2)
    total = sum(variance)
    degrees = total**2 / sum(v**2 / f for v, f in zip(variance, free)) if total else 1
    value_S = [np.mean([one[task].mean(dtype=np.float64) for task in documents]) for one in gains]
    share_B = (np.arange(1000) + 0.5) / 1000
    error_B = total**0.5 * stats.t.ppf(share_B, degrees)
    if len(gains) > 1:
        error_B = np.add.outer(error_B, stats.sem(value_S) * stats.t.ppf(share_B, len(gains) - 1))
    value, half = float(np.mean(value_S)), float(np.quantile(error_B, 0.975, method="hazen"))
    return Effect(value, value - half, value + half)


def compare(ours: Scores, other: Scores, tasks: Sequence[Task]) -> Effect:
    """How much better `ours` is than `other` on some tasks, in this run alone: see `effect`."""
    gain = {task.name: ours[task.name] - other[task.name] for task in tasks}
    return effect([gain], {task.name: task.asked_N for task in tasks})


def points(effect: Effect) -> str:
    """An effect with its interval, "+12.3 [+10.1, +14.6] points", which are hundredths."""
    value, low, high = (f"{100 * x:+.1f}" for x in effect)
    return f"{value} [{low}, {high}] points"


# Gates


def at_least(name: str, value: float, bar: float) -> Gate:
    """A gate that passes if value >= bar."""
    return _gate(name, value, ">=", bar)


def at_most(name: str, value: float, bar: float) -> Gate:
    """A gate that passes if value <= bar."""
    return _gate(name, value, "<=", bar)


def _gate(name: str, value: float, side: str, bar: float) -> Gate:
    passed = value >= bar if side == ">=" else value <= bar
    return {"name": name, "value": float(value), "side": side, "bar": float(bar), "passed": bool(passed)}


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


def above(name: str, scores: Scores, other: Scores, tasks: Sequence[Task]) -> Gate:
    """Whether a model finds more than another: the low end of the interval of the difference in nDCG@10, over
    the tasks that it was asked."""
    asked = [task for task in tasks if task.name in scores]
    return at_least(name, compare(scores, other, asked).low, 0.0)


def above_chance(name: str, scores: Scores, tasks: Sequence[Task]) -> Gate:
    """Whether a model finds more than shuffled documents give, see `above`."""
    rng, asked = np.random.default_rng(0), [task for task in tasks if task.name in scores]
    shuffled = {task.name: ndcg(task, rng.random((len(task.queries), len(task.chunks)))) for task in asked}
    return above(f"{name}: nDCG@10 above that of shuffled documents", scores, shuffled, tasks)


def mean_gates(gates: Iterable[Gate]) -> list[Gate]:
    """Gates of several seeds as one each: the mean of its number against the mean of its bar."""
    named: dict[str, list[Gate]] = {}
    for gate in gates:
        named.setdefault(gate["name"], []).append(gate)
    means = []
    for name, row in named.items():
        value, bar = (np.mean([gate[key] for gate in row]) for key in ("value", "bar"))
        means.append(_gate(name, value, row[0]["side"], bar))
    return means


def failed(gates: Iterable[Gate]) -> str:
    """The gates that did not pass, with their numbers; empty if all did."""
    return "; ".join(
        f"{gate['name']}: {gate['value']:.3g}, not {gate['side']} {gate['bar']:.3g}"
        for gate in gates
        if not gate["passed"]
    )


# What notebooks keep


def keep(study: Run, tasks: Sequence[Task], scores: Mapping[str, Scores]) -> Path:
    """Writes the score of each query to results/<run>/scores/<notebook>.npz, in half precision: off by 0.0005
    at most.

    Args:
        scores: system → task → a metric per query, nDCG@10 where nothing else is said.
    """
    read = {task.name: task for task in tasks if any(task.name in row for row in scores.values())}
    arrays = {f"documents::{name}": task.asked_N.astype(np.int32) for name, task in read.items()}
    arrays["families"] = np.array([(name, task.family) for name, task in read.items()])
    for system, row in scores.items():
        arrays |= {f"{system}::{name}": x_N.astype(np.float16) for name, x_N in row.items() if name in read}
    path = _scores(study)
    with replacing(path) as temporary, temporary.open("wb") as stream:
        np.savez_compressed(stream, **arrays)
    return path


def _scores(study: Run) -> Path:
    return study.results / "scores" / f"{study.notebook}.npz"


@dataclass(frozen=True, eq=False)
class Kept:
    """What `keep` kept."""

    families: dict[str, str]  # of each task
    documents: dict[str, np.ndarray]  # task → the document that each query asks for
    scores: dict[str, dict[str, np.ndarray]]  # system → task → a metric per query

    @classmethod
    def of(cls, study: Run) -> "Kept | None":
        """What a notebook kept; None if nothing."""
        if not (path := _scores(study)).is_file():
            return None
        try:
            arrays = dict(np.load(path))
        except (BadZipFile, ValueError, EOFError) as error:
            raise ValueError(f"{path} is broken ({error}): copy or make it again") from None
        families, scores = dict(arrays.pop("families").tolist()), {}
        for name, x_N in arrays.items():
            system, _, task = name.rpartition("::")
            scores.setdefault(system, {})[task] = x_N.astype(np.float64 if system != "documents" else int)
        return cls(families, scores.pop("documents"), scores)

    def asked(self, about: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The tasks of a claim on which all of its systems have scores: task → document of each query."""
        rows = [self.scores.get(name, {}) for name in (about["ours"], *about["other"])]
        fit = [name for name, of in self.families.items() if (of == "contextual") == about["contextual"]]
        return {name: self.documents[name] for name in fit if all(name in row for row in rows)}


# Claims

ENOUGH = 3  # seeds for a verdict


@cache
def stated() -> dict[str, dict[str, Any]]:
    """What claims.yaml says: key → the claim, its source, the paper's figures, and what is compared."""
    return yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf8"))


def judge(found: Effect, bar: float, seeds: int) -> str:
    """The verdict on "the true effect lies above the bar": by the interval alone, from three seeds on."""
    if seeds < ENOUGH:
        return ("one run", "two runs")[seeds - 1]
    return "holds" if found.low > bar else "does not hold" if found.high < bar else "open"


def claims(study: Run) -> list[Line]:
    """All claims, each over the seeds at hand that can answer it, as claims.json has them.

    Where kept scores are of too few seeds for a verdict, and results/<run>/earlier.json has more, what it
    says is taken: numbers of an earlier version of this repository, by the definition that each names.
    """
    every, saved, earlier = runs(study), metrics(study), read_json(study.results / "earlier.json")
    lines = []
    for key, about in stated().items():
        about = {"bar": 0.0, "pretrained": False} | about
        told = {name: about[name] for name in ("claim", "short", "source", "paper", "notebook", "bar")}
        blank = {"value": None, "interval": None, "seeds": {}, "why": ""}
        number = about["notebook"]
        ran = {
            seed: Kept.of(replace(every[seed], notebook=number)) for seed in saved if number in saved[seed]
        }
        asked = {seed: tasks for seed, one in ran.items() if one and (tasks := one.asked(about))}
        # Seeds whose queries are not the first one's cannot be pooled with it.
        kept = {seed: ran[seed] for seed in asked if _same(asked[seed], next(iter(asked.values())))}
        if about["pretrained"] and not study.config.backbone.checkpoint:
            found = {"verdict": "not asked", "why": "a small model from scratch can say nothing about it"}
        elif kept and len(kept) >= min(ENOUGH, len(earlier.get(key, {}).get("seeds", ()))):
            found = _found(about, kept, {seed: saved[seed] for seed in kept})
            if apart := [str(seed) for seed in asked if seed not in kept]:
                why = f"left out, since they asked other queries: seeds {', '.join(apart)}"
                found["why"] = "; ".join(filter(None, [found["why"], why]))
        elif key in earlier:
            found = _earlier(about, earlier[key])
        else:
            which = "contextual" if about["contextual"] else "plain"
            lacks = f"kept no scores of these systems on {which} tasks" if ran else "was not run"
            found = {"verdict": "not run", "why": f"notebook {number.partition('_')[0]} {lacks}"}
        line = {"key": key} | told | blank | found
        lines.append(line | {"effect": _said(line)})
    return lines


def _same(ours: Scores, other: Scores) -> bool:
    """Whether two runs asked the same queries, by task and document."""
    return ours.keys() == other.keys() and all(np.array_equal(ours[name], other[name]) for name in ours)


def _said(line: Line) -> str:
    """The effect of a claim in points; a dash where there is none."""
    if line["value"] is None:
        return "–"
    return points(Effect(line["value"], *line["interval"])).removesuffix(" points")


def _found(about: Line, kept: Mapping[int, Kept], saved: Mapping[int, Mapping[str, Any]]) -> Line:
    """What the scores of these seeds say of a claim."""
    ours, tasks = about["ours"], next(iter(kept.values())).asked(about)
    other = about["other"][0]
    if len(about["other"]) > 1:  # the better one on development data, once for all seeds
        quality = [row[about["notebook"]]["development"] for row in saved.values()]
        other = max(about["other"], key=lambda name: np.mean([row[name] for row in quality]))
    gains = {
        s: {name: one.scores[ours][name] - one.scores[other][name] for name in tasks}
        for s, one in kept.items()
    }
    alone = {str(s): float(np.mean([gain_N.mean() for gain_N in row.values()])) for s, row in gains.items()}
    value, *interval = found = effect([*gains.values()], tasks)
    missed = _missed(about["rests"], saved)
    return {
        "ours": ours,
        "other": other,
        "value": value,
        "interval": interval,
        "seeds": alone,
        "queries": sum(map(len, tasks.values())),
        "verdict": "invalid" if missed else judge(found, about["bar"], len(kept)),
        "why": missed,
    }


def _missed(rests: Mapping[str, Sequence[str]], saved: Mapping[int, Mapping[str, Any]]) -> str:
    """Which gates the trainings that a claim rests on did not pass, and which trainings a seed saved no gates
    of, since then nobody looked; empty if all is well."""
    gates, unseen = [], []
    for name, training in ((name, training) for name, row in rests.items() for training in row):
        without = []
        for seed, row in saved.items():
            made = row.get(name, {}).get("gates")
            found = made.get(training) if isinstance(made, dict) else None  # earlier versions saved a list
            gates += found or []
            without += [] if found else [str(seed)]
        unseen += [f"no gates of {training} ({name}) in seeds {', '.join(without)}"] if without else []
    return "; ".join(filter(None, [failed(mean_gates(gates)), *unseen]))


def _earlier(about: Line, said: Mapping[str, Any]) -> Line:
    """What earlier.json says of a claim."""
    verdict = judge(Effect(said["value"], *said["interval"]), about["bar"], len(said["seeds"]))
    told = {name: said[name] for name in ("value", "interval", "seeds")}
    return told | {"verdict": verdict, "why": f"by an earlier definition: {said['definition']}"}


# The runs of several seeds


def runs(study: Run) -> dict[int, Run]:
    """This run, and those whose results lie beside its own that repeat it with other seeds, by seed: named
    <run>-seed<N>, and with the same corpus, see `left_out`."""
    others = {seed: run for seed, run in _repetitions(study).items() if not _apart(study, run, seed)}
    return dict(sorted((others | {study.config.pair.seed: study}).items()))


def elsewhere(study: Run) -> str:
    """Which of the `runs` were trained elsewhere, and by which commit, for the end of a sentence; they may be
    of other code than this one."""
    copied = {str(seed): run for seed, run in runs(study).items() if not run.root.is_dir()}
    commits = sorted({run.load("provenance")["commit"][:7] or "no commit" for run in copied.values()})
    return f", of which {', '.join(copied)} were trained elsewhere ({', '.join(commits)})" if copied else ""


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
        read_of = [row for row in (one, stages.get("00_backbone", one)) if row.get("data")]
        changed += ["corpus"] * _differ(study, read_of)
        if changed:
            reasons[name] = f"differs in {', '.join(changed[:5])}"
        elif one["exit_status"]:
            reasons[name] = "failed when it last ran"
    return reasons


def _differ(study: Run, records: Sequence[Mapping[str, Any]]) -> bool:
    """Whether notebooks read corpora of other content, as far as that is recorded or some run knows it: a
    folder's name changes with the code that makes the corpus."""
    if len({one["data"] for one in records}) < 2:
        return False
    known = {}
    for run in runs(study).values():
        start = run.load("provenance").get("stages", {}).get("00_backbone", {})
        known[start.get("data")] = run.load("00_backbone").get("corpus_hash")
    return len({one.get("corpus_hash") or known.get(one["data"]) or one["data"] for one in records}) > 1


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


def gathered(tables: Iterable[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Tables of several seeds as one: row → column → the value of each seed that has one."""
    values: dict[str, dict[str, list[float]]] = {}
    for name, row in ((name, row) for table in tables for name, row in table.items()):
        for column, value in row.items():
            values.setdefault(name, {}).setdefault(column, []).append(value)
    return values
