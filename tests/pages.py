"""What stands between markers in README.md and in pages of results, made from the committed results, and what
the prose of pages must keep to. `python tests/pages.py` writes the blocks and the pictures anew.

    <!-- NAME -->
    what `BLOCKS[NAME]` returns
    <!-- end -->
"""

import ast
import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from unmask.config import resolved
from unmask.store import read_json, repository
from unmask.training import watch
from unmask_study import evidence, figures, pictures, report
from unmask_study.recipe import recipe
from unmask_study.run import Run
from unmask_study.settings import load_preset
from unmask_study.tasks import REFERENCE

ROOT = repository()
RESULTS = ROOT / "results"
PLACES = (ROOT, RESULTS, RESULTS / "benchmarks", RESULTS / "gpu", ROOT / "lib")
PAGES = (*(folder / "README.md" for folder in PLACES), RESULTS / "PAPERS.md", RESULTS / "LOG.md")
LINK = re.compile(r'\]\(([^)#]+)[^)]*\)|(?:src|srcset|href)="([^"#][^"]*)"')
BLOCK = re.compile(r"(<!-- (?!end)([a-z-]+) -->\n)(?:.*?\n)??(<!-- end -->)", re.S)
RUNS = tuple(name for name in ("cpu", "smollm2", "gpu") if (RESULTS / name / "provenance.json").is_file())
OUTSIDE = ("BM25", REFERENCE)
HEADED = ", heading first"
MODELS = {name: name for name in OUTSIDE}
MODELS |= {"pair": "ours, pairs", "contextual": "ours, context", "merged": "ours, merged"}


def committed_run(run: str) -> Run:
    """A committed run, with the values that it was made with, whatever its preset says now."""
    made, now = read_json(RESULTS / run / "provenance.json")["preset"], resolved(load_preset(run))
    values = {
        f"{name}.{key}": value
        for name, section in made.items()
        if isinstance(section, dict)
        for key, value in section.items()
        if key in now.get(name, ())
    }
    return Run("12_report", run, load_preset(run, values))


def claims(run: str) -> list[dict]:
    """The claims of a committed run, over its seeds."""
    return evidence.claims(committed_run(run))


def quality(run: str) -> str:
    """nDCG@10 of the recipe's stages beside two references, over the seeds that have all of these stages:
    docs, code, chunks in context, with the heading before each, and Wikipedia."""
    by_seed = evidence.metrics(committed_run(run))
    every = {seed: report.measured(report.STAGES, one) | _headed(one) for seed, one in by_seed.items()}
    every = {seed: one for seed, one in every.items() if MODELS.keys() <= one.keys()}
    families = evidence.gathered(every.values())
    away = evidence.gathered({"Wikipedia": _wikipedia(by_seed[seed])} for seed in every).get("Wikipedia", {})
    rows = []
    for model, name in MODELS.items():
        found, headed = families[model], families.get(model + HEADED, {}).get("contextual", [])
        columns = {"docstrings": "english", "code": "code", "in context": "contextual"}
        row = {"nDCG@10": name} | {what: _mean(found[key]) for what, key in columns.items()}
        every_seed = () if model in OUTSIDE else every  # whose number is the same for all
        row |= {"… with the heading": _mean(headed) + _few(headed, every_seed) if headed else "–"}
        rows.append(row | {"Wikipedia": _mean(away.get(model)) + _few(away.get(model, ()), every_seed)})
    seeds = f"Means over seeds {', '.join(map(str, every))}" if len(every) > 1 else "One seed"
    seeds += "".join(f"; seed {seed} has no merged model" for seed in by_seed if seed not in every)
    return report.markdown_table(rows) + f"\n\n{seeds}."


def _few(values: Sequence[float], every: Mapping) -> str:
    """Of how many seeds a number is, if not of all."""
    return f" ({len(values)} seed{'s' * (len(values) > 1)})" * (0 < len(values) < len(every))


def _headed(metrics: dict[str, dict]) -> dict[str, dict[str, float]]:
    """The systems that read the document's heading before each chunk: the mean over contextual tasks."""
    rivals = metrics.get("03_contextual", {}).get("rivals", {})
    return {name: {"contextual": mean(row.values())} for name, row in rivals.items() if HEADED in name}


def _wikipedia(metrics: dict[str, dict]) -> dict[str, float]:
    """nDCG@10 on Wikipedia of the same models, each paragraph alone."""
    found, merged = (metrics.get(name, {}).get("elsewhere", {}) for name in ("08_conteb", "09a_public"))
    found = found | {"merged": merged.get("ours (INT8)", {})}
    return {n.removesuffix(", chunks alone"): x["Wikipedia"] for n, x in found.items() if "Wikipedia" in x}


def _mean(values: list[float] | None) -> str:
    return f"{mean(values):.2f}" if values else "not run"


def verdicts() -> str:
    """The papers' own claims and our controls, with each run's effect in points, its interval, its seeds, and
    the verdict."""
    rows: dict[str, list[dict[str, str]]] = {group: [] for group in evidence.GROUPS}
    for claim in zip(*map(claims, RUNS), strict=True):
        group = claim[0]["group"]
        row = {f"{evidence.GROUPS[group].lower()}, points": claim[0]["short"]}
        if group == "paper":
            row["source"] = f"{claim[0]['paper'].partition(' (')[0]} ({_paper(claim[0])})"
        for run, one in zip(RUNS, claim, strict=True):
            seeds = f" ({len(one['seeds'])})" if one["seeds"] else ""
            effect = f"{one['effect']}{seeds}: " if one["value"] is not None else ""
            row[f"`{run}`"] = f"{effect}**{one['verdict']}**" + " †" * evidence.is_earlier(one)
        rows[group].append(row)
    return "\n\n".join(map(report.markdown_table, rows.values()))


TOO_FEW = dict.fromkeys(("one run", "two runs"), "too few seeds")


def count() -> str:
    """Which of the papers' own claims have which verdict, by run, and whose claims they are."""
    told = []
    for run in RUNS:
        own = [one for one in claims(run) if one["group"] == "paper"]
        named: dict[str, list[str]] = {}
        for one in sorted(own, key=lambda one: evidence.VERDICTS.index(one["verdict"])):
            name = one["short"].removeprefix(f"{_paper(one)}, ").partition(" (")[0]
            kind = TOO_FEW.get(one["verdict"], one["verdict"])
            named.setdefault(kind, []).append(f"*{name}* ({_paper(one)})")
        every = [f"**{kind}** {', '.join(names)}" for kind, names in named.items()]
        every = every if len(named) > 1 else [f"all {kind}" for kind in named]
        told.append(f"The four in `{run}`: {'; '.join(every)}.")
    return f"Ten claims are tested: four of papers, six controls of ours. {' '.join(told)}"


def _paper(claim: Mapping[str, str]) -> str:
    """Whose claim it is."""
    source = claim["source"].partition(",")[0]
    return "pplx-embed" if source.startswith("section") else source


def time_to_bm25() -> str:
    """After how much training a run finds more than BM25 in docstrings and code."""
    rows = []
    for run in RUNS:
        pair = read_json(RESULTS / run / "02_pair.json")
        rows.append(
            {"preset": f"`{run}`", "processor": _processor(run), "training takes": _minutes(pair) or "–"}
        )
    return report.markdown_table(rows)


def _processor(run: str) -> str:
    """What a run trained on pairs with."""
    return report.machine(read_json(RESULTS / run / "provenance.json")["stages"]["02_pair"]["processor"])


def _minutes(pair: Mapping) -> str:
    """Minutes of training until BM25 is beaten, "at most" where the first look found it so; or empty."""
    if not (seconds := pair["time_to_bm25"]):
        return ""
    beaten = watch.quality(pair["measured"][0]) > pair["bars"]["BM25"]
    return f"{'at most ' * beaten}{seconds / 60:.0f} min"


# What the page of results shows of each notebook.
FIGURES = {
    "01_diffusion_cpt": "denoising",
    "02_pair": "test",
    "03_contextual": "heading",
    "04_triplet": "test",
    "05_merge": "test",
    "06_quantization": "pareto",
    "07_diffusion_vs_ar": "test",
    "08_conteb": "effects",
    "08a_insent": "objectives",
    "09_retrieval": "query-to-document",
    "10_cde": "architecture",
    "11_qwen3_embedding": "families",
}


def questions() -> str:
    """Each notebook's question, with the answer and a figure of the largest model that has them."""
    invalid = {
        run: {x["notebook"]: x["why"] for x in claims(run) if x["verdict"] == "invalid"} for run in RUNS
    }
    text = []
    for name, figure in FIGURES.items():
        cells = read_json(ROOT / "notebooks" / f"{name}.ipynb")["cells"]
        question = "".join(cells[0]["source"]).partition("**Question.** ")[2].strip()
        picture = {run: f"{run}/figures/{name}-{figure}.png" for run in reversed(RUNS)}
        saved = {run: read_json(RESULTS / run / f"{name}.json") for run in picture}
        run, *others = (r for r in picture if "answer" in saved[r] and (RESULTS / picture[r]).is_file())
        missed = evidence.failed(chain(*saved[run]["gates"].values())) or invalid[run].get(name, "")
        why = f"*A training missed its gate, so this decides nothing ({missed}).* " if missed else ""
        number, page = name.partition("_")[0], f"../papermill_runs/{{}}/{name}.ipynb"
        told = f"{why}{saved[run]['answer']} [Notebook {number}]({page.format(run)}), `{run}`, one run."
        told += "".join(f" The same of [`{other}`]({page.format(other)})." for other in others)
        text.append(f'### {question}\n\n{told}\n\n<img alt="{question}" src="{picture[run]}">')
    return "\n\n".join(text)


# What the log says of the committed runs: topic → whether of tasks in context, and rows of words, of the
# notebook, and of the two systems whose difference it is.
LATE, ROOM = "contextual, late chunking", "contextual, long chunks"  # the latter with room for a heading
CODES = "binary", "INT8"
EFFECTS = {
    "context": (
        True,
        ("late chunking, before training it", "03_contextual", "pair, late chunking", "pair, chunks alone"),
        ("contextual training with it", "03_contextual", LATE, "pair, chunks alone"),
        ("… minus late chunking before it", "03_contextual", LATE, "pair, late chunking"),
        ("… minus the same chunks trained each alone", "08_conteb", LATE, "flattened"),
        ("… minus BM25, heading before each chunk", "03_contextual", ROOM, "BM25, heading first"),
        ("… minus the pair model, heading before each chunk", "03_contextual", ROOM, "pair, heading first"),
        ("… minus all-MiniLM-L6-v2, the same", "03_contextual", ROOM, "all-MiniLM-L6-v2, heading first"),
        ("InSeNT's objective minus the paper's", "08a_insent", "insent", LATE),
        ("bits minus INT8 (ConTEB, in the paper: −4.8)", "08_conteb", "contextual, binary", LATE),
    ),
    "negatives": (
        False,
        ("contextual training, plain tasks", "03_contextual", LATE, "pair, late chunking"),
        ("triplets, from the pair model", "04_triplet", "triplet from pair", "pair"),
        ("triplets, from the contextual model", "04_triplet", "triplet from contextual", "contextual"),
        ("CDE's encoder, not a plain one", "10_cde", "with context, look-alikes", "plain, look-alikes"),
    ),
    "merging": (
        False,
        ("the chosen merge minus contextual", "05_merge", "merged", "contextual"),
        ("the chosen merge minus triplet from pair", "05_merge", "merged", "triplet from pair"),
    ),
    "bits": (
        False,
        ("floats without the tanh minus INT8", "06_quantization", "merged, float32", "merged, INT8"),
        ("bits minus INT8", "06_quantization", "merged, binary", "merged, INT8"),
        ("… both at 256 dimensions", "06_quantization", *(f"merged, {x}, 256 dimensions" for x in CODES)),
        ("… both at 64", "06_quantization", *(f"merged, {x}, 64 dimensions" for x in CODES)),
    ),
}


def effects(topic: str) -> str:
    """Differences that committed runs measured, over their seeds, with 95 % intervals."""
    contextual, *rows = EFFECTS[topic]
    told = "points, in context" if contextual else "points, plain tasks"
    table = {run: [difference(run, *of, contextual) for _, *of in rows] for run in RUNS}
    table = {f"`{run}`": column for run, column in table.items() if {*column} != {"–"}}
    lines = zip([words for words, *_ in rows], *table.values(), strict=True)
    return report.markdown_table([dict(zip((told, *table), line, strict=True)) for line in lines])


def difference(run: str, notebook: str, ours: str, other: str, contextual: bool) -> str:
    """How much more one system finds than another; a dash where a run kept no scores of both."""
    studies = evidence.runs(committed_run(run)).values()
    studies = (replace(one, notebook=notebook) for one in studies)
    found, seeds = evidence.kept_effect(studies, ours, other, contextual)
    if not found:
        return "–"
    return evidence.points(found).removesuffix(" points") + f" ({seeds} seeds)" * (seeds > 1)


FEW = tuple(  # rows that say the most
    (what, "sentence-transformers")
    for what in ("cached step, real lengths", "cached step, equal lengths", "encode, real lengths, bf16")
)


def speed(few: bool = False) -> str:
    """How many times as fast as its peer each step is, and with how many times less memory."""
    every = json.loads((RESULTS / "benchmarks" / "benchmarks.json").read_text("utf8"))
    ratio = {row["name"]: row["ratio"] for row in every}
    rows = []
    for row in (row for row in every if ": speed, " in row["name"]):
        what, peer = row["name"].split(": speed, ")
        memory, spread = ratio.get(f"{what}: peak memory, {peer}"), row.get("spread")
        rounds = "{:.2f} to {:.2f}".format(*spread) if spread else "–"
        rows.append({"what": what, "beside": peer, "speed": f"{row['ratio']:.2f}×", "five rounds": rounds})
        rows[-1]["memory"] = (f"1/{memory:.1f}" if memory >= 1 else f"{1 / memory:.1f}×") if memory else "–"
    return report.markdown_table([row for row in rows if not few or (row["what"], row["beside"]) in FEW])


def coverage() -> str:
    """How many rows of PAPERS.md need nothing but this machine, how many more, and how many are not built."""
    page = (RESULTS / "PAPERS.md").read_text("utf8").partition("## What is missing")[0]
    rows = re.findall(r"^\| (?!table or figure|-)(.+?) \| (.+?) \| (.+?) \|$", page, re.M)
    missing = sum("not built" in here or "not known" in here for _, here, _ in rows)
    alone = sum(needs.startswith("nothing") and "not built" not in here for _, here, needs in rows)
    lines = {"need nothing but this machine: a small model, own tasks": alone}
    lines |= {"built, and need the Hub, a GPU or a language model": len(rows) - alone - missing}
    lines |= {"not built, or not known": missing, "all": len(rows)}
    return report.markdown_table(
        [{"rows of the tables below": what, "": count} for what, count in lines.items()]
    )


# A pair's way to its gradient: module and function of `unmask`, what comes out of it.
FLOW = (
    ("data.rows", "read", "a row of a file, checked: query, document, key, split"),
    ("data.tokenize", "token_pairs", "token ids of each query and document, tokens_L, memory-mapped"),
    ("data.batches", "BatchPlan", "a data set, and the numbers of N of its rows"),
    ("training.contrastive", "Pair", "a batch: N queries, then their N documents, R = 2N texts"),
    ("training.cache", "cached_backward", "micro-batches of like lengths; later their gradients"),
    ("models.encoding", "encode_rows", "hidden_TD of all their tokens, then their means, rows_RD"),
    ("models.quantize", "int8", "codes_RD, whole numbers from −127 to 127"),
    ("losses.contrastive", "pair_loss", "the loss, a scalar in nats; its gradient on rows_RD goes back up"),
    ("training.loop", "optimize", "the weights, a step further"),
)


def flow() -> str:
    """`FLOW`, with the line at which each function or class begins."""
    rows = []
    for module, name, outcome in FLOW:
        path = Path("unmask", *module.split(".")).with_suffix(".py")
        tree = ast.parse((ROOT / "lib" / path).read_text("utf8"))
        line = next(node.lineno for node in tree.body if getattr(node, "name", "") == name)
        rows.append({"": "↓", "where": f"[{module}.{name}]({path}#L{line})", "what comes out": outcome})
    return report.markdown_table(rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "quality": lambda: quality("smollm2"),
    "quality-cpu": lambda: quality("cpu"),
    "claims": verdicts,
    "count": count,
    "questions": questions,
    "time-to-bm": time_to_bm25,
    "speed": speed,
    "speed-few": lambda: speed(few=True),
    "coverage": coverage,
    **{f"effects-{topic}": partial(effects, topic) for topic in EFFECTS},
    "flow": flow,
}


def written(page: Path) -> str:
    """A page with its blocks as the results have them now."""
    return BLOCK.sub(lambda found: f"{found[1]}{BLOCKS[found[2]]()}\n{found[3]}", page.read_text("utf8"))


def dead_links(page: Path) -> list[str]:
    """Where a page, or its HTML, links to nothing in the checkout."""
    links = map("".join, LINK.findall(page.read_text("utf8")))
    return [link for link in links if "://" not in link and not (page.parent / link).exists()]


def committed(*patterns: str) -> list[Path]:
    """The files of the checkout that git has under these names; skips the test that asks outside of git."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", *patterns], capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split()]


def prose(text: str) -> str:
    """What of a page a reader reads as sentences: no tables, code, blocks, links' targets or pictures."""
    text = re.sub(r"```.*?```|<!--.*?-->", "", BLOCK.sub("", text), flags=re.S)
    text = re.sub(r"<[^>]+>|!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return "\n".join(line for line in text.split("\n") if not line.startswith("|"))


def numbers(text: str) -> float:
    """Words with a digit in a hundred words of prose; names in code do not count."""
    words = re.sub(r"`[^`]*`", "code", prose(text)).split()
    return 100 * sum(bool(re.search(r"\d", word)) for word in words) / max(1, len(words))


def drawings() -> dict[Path, str]:
    """The recipe's picture, for light and for dark pages."""
    return {RESULTS / "recipe.svg": recipe(), RESULTS / "recipe-dark.svg": recipe(dark=True)}


def by_context(run: str) -> figures.Figure:
    """What each system finds in context: chunks alone, with their document, with its heading before each."""
    by_seed = evidence.metrics(committed_run(run)).values()
    found = evidence.gathered(report.measured(report.STAGES, one) | _headed(one) for one in by_seed)
    headed = [name for name in found if name.endswith(HEADED)]
    groups = {"alone": (*OUTSIDE, "pair"), "late": ("contextual",), "headed": headed}
    drawn = {
        group: {n: found[n]["contextual"] for n in names if n in found} for group, names in groups.items()
    }
    title = f"Context by training, or by the document's heading? ({run}; a dot is a seed)"
    return pictures.dots(drawn, title=title, xlabel="nDCG@10 on chunks that need their document")


def by_cost() -> figures.Figure:
    """nDCG@10 of development queries against minutes of training, diffusion included; BM25 is a line."""
    curves, bars, told = {}, {}, []
    for run in RUNS:
        pair, diffusion = (read_json(RESULTS / run / f"{n}.json") for n in ("02_pair", "01_diffusion_cpt"))
        if rows := pair.get("measured"):
            quality = [watch.quality(row) for row in rows]
            minutes = [(diffusion["train_seconds"] + row["seconds"]) / 60 for row in rows]
            curves[f"{run}, {_processor(run)}"] = minutes, quality
            bars |= pair["bars"]
            told += [f"{run} {_minutes(pair)}"] if pair["time_to_bm25"] else []
    title = f"Level with BM25 on development data after: {', '.join(told) or 'not yet'}"
    about = {"xlabel": "minutes of training, diffusion included", "ylabel": "nDCG@10 (development data)"}
    return figures.lines(curves, reference=bars, title=title, **about)


def latest(notebook: str, key: str) -> dict:
    """What a notebook saved under a key in the largest run that has it; empty where none has."""
    saved = (read_json(RESULTS / run / f"{notebook}.json").get(key) for run in reversed(RUNS))
    return next(filter(None, saved), {})


def illustrations() -> dict[str, figures.Figure]:
    """The pages' pictures, from what the committed runs saved: name → figure."""
    own = [one for run in RUNS for one in claims(run) if one["group"] == "paper"]
    held = {one["key"] for one in own if one["verdict"] == "holds"}
    title = f"Shown so far: {len(held)} of the papers' {len(own) // len(RUNS)} claims (stars: their figures)"
    drawn = {"claims": figures.claims({run: claims(run) for run in RUNS}, title=title)}
    drawn |= {"attention-masks": pictures.attention_masks(), "cost-and-quality": by_cost()}
    drawn["context-by-heading"] = by_context(next(reversed(RUNS)))
    if strip := latest("01_diffusion_cpt", "strip"):
        drawn["denoising-strip"] = pictures.strip(**strip)
    if heat := latest("03_contextual", "heat"):
        drawn["similarity-heatmap"] = similarities(heat)
    return drawn


def similarities(heat: dict) -> figures.Figure:
    """Cosines of chunks with queries, each chunk alone and with its document, as notebook 03 saved them."""
    panels = {"each chunk alone": np.array(heat["alone"]), "with its document": np.array(heat["late"])}
    queries = range(len(heat["golds"]))
    rings, edges = [*zip(heat["golds"], queries)], [*accumulate(heat["documents"])][:-1]
    named = {"rows": heat["chunks"], "columns": heat["queries"], "borders": dict.fromkeys(panels, edges)}
    first = [((x >= x[heat["golds"], queries]).sum(0) == 1).sum() for x in panels.values()]
    ways = f"{first[0]} of {len(rings)} queries alone, for {first[1]} with its document"
    title = f"The right chunk (ringed) is nearest for {ways}"
    return pictures.heatmaps(panels, rings=rings, queries=1, numbers=".2f", height=0.24, title=title, **named)


if __name__ == "__main__":
    for path, text in drawings().items():
        path.write_text(text, encoding="utf8")
    for name, figure in illustrations().items():
        figure.save(RESULTS / f"{name}.png")
    for page in PAGES:
        page.write_text(written(page), encoding="utf8")
        share = numbers(page.read_text("utf8"))
        print(f"{page.relative_to(ROOT)}: {page.stat().st_size} bytes, {share:.1f} numbers")
