"""What the runs say of the claims: effects with intervals, gates of trainings, verdicts.

Every notebook saves the score of each query, results/<run>/scores/<notebook>.parquet. claims.yaml says which
two systems a claim compares, on which tasks, and on which trainings it rests. Notebook 12 computes all claims
from these files, over all seeds: a definition can be mended without training anew.

A training that fails its own purpose says nothing about the paper: a claim that rests on it is "invalid".
What a training must show is a gate, a number and its bar. Notebooks save their gates beside their metrics.

Shape suffixes: N queries · C documents that they ask for · S seeds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow
import yaml
from scipy import stats

from unmask.config import resolved
from unmask.evaluation.tasks import Task, ndcg
from unmask.store import read_json, replacing
from unmask_study.run import Run, seed_runs
from unmask_study.settings import comparable

FAILED = "failed when it last ran"
ENOUGH = 3  # seeds for a verdict
VERDICTS = ("holds", "does not hold", "open", "one run", "two runs", "invalid", "not asked", "not run")
GROUPS = {"paper": "The papers' own", "control": "Our controls"}  # of claims, in claims.yaml's order
Gate = dict[str, Any]
Claim = Mapping[str, Any]  # as claims.yaml states it
Line = dict[str, Any]  # a claim with its effect and verdict, as in claims.json
Scores = Mapping[str, np.ndarray]  # task → a metric per query
Nats = Mapping[str, float]  # share of masks → nats per masked token


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
    for task, document_N in documents.items():
        gain_N = np.mean([one[task] for one in gains], axis=0, dtype=np.float64)
        _, number_N = np.unique(document_N, return_inverse=True)
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
    return effect([gain], {task.name: task.document_N for task in tasks})


def by_family(ours: Scores, other: Scores, tasks: Sequence[Task]) -> dict[str, Effect]:
    """`compare` within each family of tasks."""
    families = dict.fromkeys(task.family for task in tasks)
    return {one: compare(ours, other, [task for task in tasks if task.family == one]) for one in families}


def points(effect: Effect) -> str:
    """An effect with its interval, "+12.3 [+10.1, +14.6] points", which are hundredths."""
    value, low, high = (f"{100 * x:+z.1f}" for x in effect)
    return f"{value} [{low}, {high}] points"


def clear(effects: Mapping[str, Effect]) -> str:
    """Which of several effects do not have zero in their interval, as a sentence of an answer."""
    gains = [name for name, one in effects.items() if one.low > 0]
    losses = [name for name, one in effects.items() if one.high < 0]
    return f"Clear gains: {', '.join(gains) or 'none'}; clear losses: {', '.join(losses) or 'none'}."


# Gates


def gate(name: str, value: float, side: str, bar: float) -> Gate:
    """A gate that passes if value >= bar, or value <= bar, as `side` says."""
    passed = value >= bar if side == ">=" else value <= bar
    return {"name": name, "value": float(value), "side": side, "bar": float(bar), "passed": bool(passed)}


def learnt(name: str, curve: Sequence[Mapping[str, Any]]) -> Gate:
    """Whether a training's loss fell: the mean of the last tenth of the steps, three at least, against that
    of the first tenth. Losses of different data sets are not comparable: each is taken as its distance from
    the mean of its data set.

    Args:
        name: of the training; curve: its logged steps, with "loss" and perhaps "dataset".
    """
    log = pd.DataFrame([{"dataset": "", **row} for row in curve])
    loss_S = log.loss - log.groupby("dataset").loss.transform("mean") + log.loss.mean()
    few = max(3, len(loss_S) // 10)
    start, end = loss_S[:few].mean(), loss_S[-few:].mean()
    return gate(f"{name}: loss at the end, below its start", end, "<=", start)


def denoises(trained: Nats, slope: float, bars: Mapping[str, float]) -> list[Gate]:
    """Whether a diffusion backbone uses the unmasked text, and learnt to: nats per masked token must rise
    with the share of masks, and at the fewest masks lie below some bars.

    Args:
        trained: share of masks → nats per masked token, from the fewest masks to 1.
        slope: least rise in nats, fewest masks to all.
        bars: whose nats → how many, for instance those of the base made bidirectional, untrained.
    """
    few, most = min(trained, key=float), max(trained, key=float)
    least = trained[few]
    rise = gate(f"denoising slope, nats from t = {few} to {most}", trained[most] - least, ">=", slope)
    below = [gate(f"nats at t = {few}, at most {whose}", least, "<=", bar) for whose, bar in bars.items()]
    return [rise, *below]


def above(name: str, scores: Scores, other: Scores, tasks: Sequence[Task]) -> Gate:
    """Whether a model finds more than another: the low end of the interval of the difference in nDCG@10, over
    the tasks on which it has scores."""
    tasks = [task for task in tasks if task.name in scores]
    return gate(name, compare(scores, other, tasks).low, ">=", 0.0)


def above_chance(name: str, scores: Scores, tasks: Sequence[Task]) -> Gate:
    """Whether a model finds more than shuffled documents give, see `above`."""
    rng, tasks = np.random.default_rng(0), [task for task in tasks if task.name in scores]
    shuffled = {task.name: ndcg(task, rng.random((len(task.queries), len(task.chunks)))) for task in tasks}
    return above(f"{name}: nDCG@10 above that of shuffled documents", scores, shuffled, tasks)


def mean_gates(gates: Iterable[Gate]) -> list[Gate]:
    """Gates of several seeds as one each: the mean of its number against the mean of its bar."""
    by_name = pd.DataFrame(gates, columns=["name", "value", "side", "bar"]).groupby("name", sort=False)
    means = by_name.agg({"value": "mean", "side": "first", "bar": "mean"})
    return [gate(*row) for row in means.itertuples()]


def failed(gates: Iterable[Gate]) -> str:
    """The gates that did not pass, with their numbers; empty if all did."""
    text = "{name}: {value:.3g}, not {side} {bar:.3g}"
    return "; ".join(text.format(**one) for one in gates if not one["passed"])


# Scores of each query


def _scores_file(study: Run) -> Path:
    return study.results / "scores" / f"{study.notebook}.parquet"


def save_scores(study: Run, tasks: Sequence[Task], scores: Mapping[str, Scores]) -> Path:
    """Writes the score of each query to results/<run>/scores/<notebook>.parquet, to four digits.

    Args:
        scores: system → task → a metric per query, nDCG@10 where nothing else is said.
    """
    tables = []
    for task in (task for task in tasks if any(task.name in row for row in scores.values())):
        about = {"task": task.name, "family": task.family, "documents": task.document_N}
        by_system = {name: row[task.name].round(4) for name, row in scores.items() if task.name in row}
        tables.append(pd.DataFrame(about | by_system))
    with replacing(_scores_file(study)) as unfinished:
        pd.concat(tables).to_parquet(unfinished, index=False)
    return _scores_file(study)


def load_scores(study: Run) -> pd.DataFrame:
    """What `save_scores` wrote, a row for each query: its "task", "family", and the number of the "documents"
    that answers it, then each system's score; NaN where a system has none. Empty where nothing was saved."""
    try:
        return pd.read_parquet(path := _scores_file(study))
    except FileNotFoundError:
        return pd.DataFrame(columns=["task", "family", "documents"])
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} is broken ({error}): copy or make it again") from None


# Claims


@cache
def stated() -> dict[str, dict[str, Any]]:
    """What claims.yaml says: key → the claim, its source, the paper's figures, and what is compared."""
    claims = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf8"))
    return {key: {"bar": 0.0, "pretrained": False} | about for key, about in claims.items()}


def judge(difference: Effect, bar: float, seeds: int) -> str:
    """The verdict on "the true effect lies above the bar": by the interval alone, from three seeds on."""
    if seeds < ENOUGH:
        return ("one run", "two runs")[seeds - 1]
    return "holds" if difference.low > bar else "does not hold" if difference.high < bar else "open"


def claims(study: Run) -> list[Line]:
    """All claims, each over the seeds at hand that can answer it, as claims.json has them.

    Where saved scores are of too few seeds for a verdict, and results/<run>/earlier.json has more, what it
    says is taken: value, interval, seeds, verdict and why, by an earlier version of this repository.
    """
    every, saved, earlier = runs(study), metrics(study), read_json(study.results / "earlier.json")
    lines = []
    for key, about in stated().items():
        notebook, before = about["notebook"], earlier.get(key, {"seeds": ()})
        ran = [seed for seed in saved if notebook in saved[seed]]
        ask = partial(_of_systems, systems=[about["ours"], *about["other"]], contextual=about["contextual"])
        tables = {seed: ask(replace(every[seed], notebook=notebook)) for seed in ran}
        queries = {seed: table[["task", "documents"]] for seed, table in tables.items() if len(table)}
        first = next(iter(queries.values()), None)
        pooled = {seed: tables[seed] for seed, asks in queries.items() if asks.equals(first)}
        line = {"value": None, "interval": None, "seeds": {}, "why": ""}
        if about["pretrained"] and not study.config.backbone.checkpoint:
            line |= {"verdict": "not asked", "why": "a small model from scratch can say nothing about it"}
        elif pooled and len(pooled) >= min(ENOUGH, len(before["seeds"])):
            line |= _measured(about, pooled, {seed: saved[seed] for seed in pooled})
            if apart := [str(seed) for seed in queries if seed not in pooled]:
                why = f"left out, since they asked other queries: seeds {', '.join(apart)}"
                line["why"] = "; ".join(filter(None, [line["why"], why]))
        elif before["seeds"]:
            line |= before
        else:
            kind = "contextual" if about["contextual"] else "plain"
            missing = f"saved no scores of these systems on {kind} tasks" if ran else "was not run"
            line |= {"verdict": "not run", "why": f"notebook {notebook.partition('_')[0]} {missing}"}
        measured = None if line["value"] is None else Effect(line["value"], *line["interval"])
        line["effect"] = points(measured).removesuffix(" points") if measured else "–"
        names = ("claim", "short", "group", "source", "paper", "notebook", "bar")
        lines.append({"key": key} | {name: about[name] for name in names} | line)
    return lines


def is_earlier(claim: Mapping[str, Any]) -> bool:
    """Whether what a claim says was measured by an earlier definition."""
    return claim["why"].startswith("by an earlier definition")


def _of_systems(study: Run, systems: Sequence[str], contextual: bool | None) -> pd.DataFrame:
    """The scores of some systems on the tasks on which all of them have some, see `kept_effect`."""
    scores = load_scores(study)
    if contextual is not None:
        scores = scores[(scores.family == "contextual") == contextual]
    return scores.reindex(columns=["task", "documents", *systems]).dropna(ignore_index=True)


def kept_effect(
    studies: Iterable[Run], ours: str, other: str, contextual: bool | None = None
) -> tuple[Effect | None, int]:
    """How much more one system finds than another by the scores that notebooks kept, and of how many runs.

    Args:
        studies: a notebook's runs, one for each seed; those without such scores of both systems do not count.
        contextual: whether of contextual tasks alone, or of plain ones; None: of all.
    """
    tables = [table for one in studies if len(table := _of_systems(one, [ours, other], contextual))]
    asked = [table[["task", "documents"]] for table in tables]
    same = [table for table, queries in zip(tables, asked) if queries.equals(asked[0])]
    gains = [_by_task(table, table[ours] - table[other]) for table in same]
    return (effect(gains, _by_task(same[0], same[0].documents)) if same else None), len(same)


def _by_task(table: pd.DataFrame, x: pd.Series) -> dict[str, np.ndarray]:
    return {task: x_N.to_numpy() for task, x_N in x.groupby(table.task, sort=False)}


def _measured(about: Claim, scores: Mapping[int, pd.DataFrame], saved: Mapping[int, Mapping]) -> Line:
    """What the scores of these seeds say of a claim."""
    ours, other = about["ours"], about["other"][0]
    if len(about["other"]) > 1:  # the better one on development data, once for all seeds
        quality = [row[about["notebook"]]["development"] for row in saved.values()]
        other = max(about["other"], key=lambda name: np.mean([row[name] for row in quality]))
    gains = {seed: _by_task(table, table[ours] - table[other]) for seed, table in scores.items()}
    table = next(iter(scores.values()))
    difference = effect([*gains.values()], _by_task(table, table.documents))
    why = _gates_missed(about["rests"], saved)
    verdict = "invalid" if why else judge(difference, about["bar"], len(scores))
    by_seed = {str(seed): float(np.mean([*map(np.mean, gain.values())])) for seed, gain in gains.items()}
    line = {"ours": ours, "other": other, "value": difference.value, "interval": [*difference[1:]]}
    return line | {"seeds": by_seed, "queries": len(table), "verdict": verdict, "why": why}


def _gates_missed(rests: Mapping[str, Sequence[str]], saved: Mapping[int, Mapping[str, Any]]) -> str:
    """Which gates the trainings that a claim rests on did not pass, and which trainings a seed saved no gates
    of, since then nobody looked; empty if all is well."""
    gates, unseen = [], []
    for name, training in ((name, training) for name, row in rests.items() for training in row):
        by_seed = {seed: row.get(name, {}).get("gates", {}).get(training, []) for seed, row in saved.items()}
        gates += [gate for row in by_seed.values() for gate in row]
        if without := [str(seed) for seed, row in by_seed.items() if not row]:
            unseen.append(f"no gates of {training} ({name}) in seeds {', '.join(without)}")
    return "; ".join(filter(None, [failed(mean_gates(gates)), *unseen]))


# The runs of several seeds


def runs(study: Run) -> dict[int, Run]:
    """This run and those that repeat it with other seeds, by seed: their results lie beside its own, named
    <run>-seed<N>, and are of the same values and corpus, see `left_out`."""
    others = {seed: run for seed, run in _repetitions(study).items() if not _differences(study, run, seed)}
    return dict(sorted((others | {study.config.pair.seed: study}).items()))


def elsewhere(study: Run) -> str:
    """Which of the `runs` were trained elsewhere, and by which commit, for the end of a sentence; they may be
    of other code than this one."""
    copied = {str(seed): run for seed, run in runs(study).items() if not run.root.is_dir()}
    commits = sorted({run.load("provenance")["commit"][:7] or "no commit" for run in copied.values()})
    return f", trained elsewhere: {', '.join(copied)} ({', '.join(commits)})" if copied else ""


def left_out(study: Run) -> dict[str, str]:
    """Runs that are named as repetitions of this one but cannot be pooled, and notebooks of the others that
    failed; each with why."""
    why = {run.name: _differences(study, run, seed) for seed, run in _repetitions(study).items()}
    failures = {f"{run.name}, {name}": FAILED for run in runs(study).values() for name in _failures(run)}
    return {name: text for name, text in why.items() if text} | failures


def _repetitions(study: Run) -> dict[int, Run]:
    return {seed: replace(study, name=folder.name) for seed, folder in seed_runs(study.results).items()}


def _differences(study: Run, run: Run, seed: int) -> str:
    """Why a run cannot be pooled as this one with another seed; empty if it can."""
    if not (preset := run.load("provenance").get("preset")):
        return "has no provenance.json: copy that, too"
    if (trained := preset["pair"]["seed"]) != seed:
        return f"was trained with seed {trained}"
    made, now = comparable(preset), comparable(resolved(study.config))
    names = sorted(key for key in made.keys() & now.keys() if made[key] != now[key])
    if len({one.load("00_backbone").get("corpus_hash") for one in (study, run)}) > 1:
        names.append("corpus")
    return f"differs in {', '.join(names[:5])}" if names else ""


def _failures(run: Run) -> list[str]:
    stages = run.load("provenance").get("stages", {})
    return [name for name, stage in stages.items() if stage["exit_status"]]


def metrics(study: Run, needed: str = "00_backbone") -> dict[int, dict[str, dict[str, Any]]]:
    """What the notebooks of all `runs` saved, which each does when it ends: seed → notebook → metrics.

    Raises: ValueError if this run's notebook `needed` was not run or failed, or the run was made with other
        values.
    """
    saved, seed = {}, study.config.pair.seed
    for number, run in runs(study).items():
        names = {path.stem for path in run.results.glob("[0-9]*.json")} - {run.notebook, *_failures(run)}
        saved[number] = {name: run.load(name) for name in sorted(names)}
    why = _differences(study, study, seed) if study.load("provenance") else ""
    if why or needed not in saved[seed]:
        why = why or (FAILED if needed in _failures(study) else "was not run")
        command = f"unmask run --preset {study.config.name} --run {study.name}"
        raise ValueError(f"notebook {needed} of run {study.name!r} {why}: `{command}`, with your --set")
    return saved


def gathered(tables: Iterable[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Tables of several seeds as one: row → column → the value of each seed that has one."""
    values: dict[str, dict[str, list[float]]] = {}
    for name, row in (item for table in tables for item in table.items()):
        for column, value in row.items():
            values.setdefault(name, {}).setdefault(column, []).append(value)
    return values
