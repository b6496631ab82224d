"""The paper presets hold the paper's numbers, and every preset describes the model it says."""

from __future__ import annotations

import re

import pytest
import torch
import yaml

from unmask.config import load_preset, preset_names, resolved
from unmask.models import backbone
from unmask.store import repository
from unmask.study.plan import PROMPT_TOKENS, describe, parameters, trainings

PRESETS = repository() / "papermill_runs" / "presets"
PAPER = ("paper-0.6b", "paper-4b")

DIMENSIONS = (128, 256, 512, 1024, 2048, 2560)
# key, value of the 0.6 B model, value of the 4 B model, where the paper says so
NUMBERS = [
    ("backbone.checkpoint", "Qwen/Qwen3-0.6B-Base", "Qwen/Qwen3-4B-Base", "section 2.1"),
    ("diffusion.steps", 60_000, 60_000, "section 2.1"),
    ("diffusion.batch", 1024, 1024, "section 2.1"),
    ("diffusion.length", 4096, 4096, "section 2.1"),
    ("diffusion.t_min", 0.001, 0.001, "section 2.1"),
    ("diffusion.cut_fraction", 0.01, 0.01, "section 2.1"),
    ("diffusion.lr", 5e-4, 3.16e-4, "section 2.1"),
    ("diffusion.schedule", "wsd", "wsd", "section 2.1"),
    ("diffusion.warmup", 6_000, 6_000, "appendix A"),
    ("diffusion.decay", 12_000, 12_000, "appendix A"),
    ("diffusion.beta1", 0.9, 0.9, "appendix A"),
    ("diffusion.beta2", 0.98, 0.98, "appendix A"),
    ("diffusion.weight_decay", 0.01, 0.01, "appendix A"),
    ("diffusion.precision", "bf16", "bf16", "appendix A"),
    ("pair.steps", 50_000, 50_000, "appendix B"),
    ("pair.batch", 16_384, 16_384, "appendix B"),
    ("pair.query_length", 256, 256, "appendix B"),
    ("pair.document_length", 256, 256, "appendix B"),
    ("pair.lr", 2e-4, 5e-5, "appendix B"),
    ("pair.temperature", 0.02, 0.02, "appendix B"),
    ("pair.margin", 0.1, 0.1, "section 2.3"),
    ("pair.pooling", "mean", "mean", "section 2.2"),
    ("contextual.steps", 7_000, 7_000, "appendix B"),
    ("contextual.batch", 128, 16, "appendix B"),
    ("contextual.chunk_length", 256, 256, "appendix B"),
    ("contextual.chunks", 16, 16, "appendix B"),
    ("contextual.dimensions", DIMENSIONS, DIMENSIONS, "appendix B"),
    ("contextual.alpha", 0.2, 0.2, "section 2.4"),
    ("contextual.beta_start", 0.2, 0.2, "section 2.4"),
    ("contextual.beta_end", 0.5, 0.5, "section 2.4"),
    ("contextual.lr", 1e-5, 1e-5, "appendix B"),
    ("contextual.weight_decay", 0.1, 0.1, "appendix B"),
    ("contextual.clip", 1.0, 1.0, "appendix B"),
    ("contextual.temperature", 0.02, 0.02, "appendix B"),
    ("contextual.margin", 0.1, 0.1, "appendix B"),
    ("triplet.steps", 2_000, 2_000, "appendix B"),
    ("triplet.batch", 512, 512, "appendix B"),
    ("triplet.accumulation", 4, 4, "appendix B"),
    ("triplet.query_length", 512, 512, "appendix B"),
    ("triplet.document_length", 512, 512, "appendix B"),
    ("triplet.negatives", 3, 3, "appendix B"),
    ("triplet.temperature", 0.03, 0.03, "appendix B"),
    ("triplet.lr", 5e-5, 1e-5, "appendix B"),
    ("evaluation.query_length", 1024, 1024, "appendix C"),
    ("evaluation.document_length", 1024, 1024, "appendix C"),
    ("ablation.ema", 0.02, 0.02, "figure 2"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "small", "large", "where"), NUMBERS, ids=[row[0] for row in NUMBERS])
def test_the_paper_presets_hold_the_papers_numbers(key, small, large, where):
    section, name = key.split(".")
    for preset, value in zip(PAPER, (small, large), strict=True):
        assert getattr(getattr(load_preset(preset), section), name) == value, f"{preset}: {where}"


@pytest.mark.parametrize("row", NUMBERS, ids=[row[0] for row in NUMBERS])
def test_the_preset_names_the_same_place_in_the_paper(row):
    key, _, _, where = row
    section, name = key.split(".")
    assert where in _comments("paper-0.6b")[section, name]


# The same for the neighbours, whose papers report one size: key, value, which paper and where
NEIGHBOURS = [
    ("clusters.packing", "tour", "CDE, section 10.5"),
    ("clusters.iterations", 100, "CDE, section 5"),
    ("clusters.attempts", 3, "CDE, section 5"),
    ("cde.batch", 512, "CDE, table 1"),
    ("cde.cluster_size", 512, "CDE, table 1"),
    ("cde.query_length", 512, "CDE, section 5"),
    ("cde.document_length", 512, "CDE, section 5"),
    ("cde.temperature", 0.02, "CDE, section 5"),
    ("cde.pooling", "mean", "CDE, section 5"),
    ("cde.lr", 2e-5, "CDE, section 5"),
    ("cde.schedule", "linear", "CDE, section 5"),
    ("cde.warmup", 1000, "CDE, section 5"),
    ("cde.context", 512, "CDE, section 5"),
    ("cde.sequence_dropout", 0.005, "CDE, section 5"),
    ("qwen3.margin", 0.1, "Qwen3-Embedding, section 3.1"),
    ("qwen3.pooling", "last", "Qwen3-Embedding, section 2"),
    ("qwen3.quantize", False, "Qwen3-Embedding, section 2"),
    ("reranker.candidates", 100, "Qwen3-Embedding, section 4.2"),
]


@pytest.mark.parametrize(("key", "value", "where"), NEIGHBOURS, ids=[row[0] for row in NEIGHBOURS])
def test_the_neighbours_have_their_papers_numbers(key, value, where):
    section, name = key.split(".")
    assert getattr(getattr(load_preset("paper-0.6b"), section), name) == value
    assert _comments("paper-0.6b")[section, name].startswith(where)


def test_diffusion_pretraining_reads_250_billion_tokens():
    for name in PAPER:
        tokens = {t.stage: t.tokens for t in trainings(load_preset(name), 1)}["diffusion"]
        assert tokens == 60_000 * 1_024 * 4_096 == pytest.approx(250e9, rel=0.01)


@pytest.mark.parametrize("name", [*PAPER, "hub-0.6b"])
def test_every_value_has_a_source(name):
    source = re.compile(
        r"(paper|CDE|Qwen3-Embedding), (section|appendix|figure|table) [0-9A-C]"
        r"|choice: \w|Qwen3-\S+-Base|unused"
    )
    comments = _comments(name)
    values = yaml.safe_load((PRESETS / f"{name}.yaml").read_text(encoding="utf8"))
    written = {
        (section, key) for section in values if isinstance(values[section], dict) for key in values[section]
    }
    assert set(comments) == {pair for pair in written if pair[0] != "ar"}
    for place, comment in comments.items():
        assert source.match(comment), f"{name}: {place} has no source: {comment!r}"


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_that_extends_another_writes_only_what_differs(name):
    own = yaml.safe_load((PRESETS / f"{name}.yaml").read_text(encoding="utf8"))
    own.pop("about")
    if parent := own.pop("extends", None):
        base = resolved(load_preset(parent))
        written = {(section, key): value for section in own for key, value in own[section].items()}
        assert not [place for place, value in written.items() if value == base[place[0]][place[1]]]


@pytest.mark.parametrize(
    ("name", "stated"),
    [("paper-0.6b", 596e6), ("hub-0.6b", 596e6), ("paper-4b", 4.02e9), ("gpu", 100e6), ("cpu", 2.75e6)],
)
def test_the_stated_size_is_the_models(name, stated):
    preset = load_preset(name)
    with torch.device("meta"):
        model = backbone.build(preset.backbone, Vocabulary(preset.data.vocab_size), seed=0)
    everything = sum(p.numel() for p in model.parameters())
    assert everything == pytest.approx(stated, rel=0.05 if name in ("gpu", "cpu") else 0.002)
    embeddings = model.get_input_embeddings().weight.numel()
    assert parameters(preset) == (everything, everything - embeddings)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_fits_the_machine_it_is_for(name):
    preset = load_preset(name)
    assert f"plan of preset {name!r}" in describe(preset, gpus=preset.parallel.num_processes)


def test_the_time_limits_of_the_presets_hold_in_the_estimate():
    for name, hours in (("gpu", 29 / 60), ("hub-0.6b", 24)):
        preset = load_preset(name)
        gpus = preset.parallel.num_processes
        assert sum(t.gpu_hours for t in trainings(preset, gpus)) / gpus <= hours


@pytest.mark.parametrize("name", preset_names())
def test_documents_and_texts_fit_the_positions(name):
    preset = load_preset(name)
    contextual = preset.contextual
    document = contextual.chunks * contextual.chunk_length + contextual.chunks - 1
    texts = [getattr(preset, name) for name in ("pair", "triplet", "cde", "qwen3", "reranker", "evaluation")]
    lengths = [length for config in texts for length in (config.query_length, config.document_length)]
    prompt = PROMPT_TOKENS + preset.reranker.query_length + preset.reranker.document_length
    longest = max(document, preset.diffusion.length, prompt, *lengths)
    assert longest <= preset.backbone.max_length


class Vocabulary:
    """As much of a tokenizer as building a model asks for."""

    pad_token_id = 0

    def __init__(self, size: int):
        self._size = size

    def __len__(self) -> int:
        return self._size


def _comments(name: str) -> dict[tuple[str, str], str]:
    """(section, key) → comment of every `  key: value` line of a preset file."""
    comments, section = {}, ""
    for line in (PRESETS / f"{name}.yaml").read_text(encoding="utf8").splitlines():
        if match := re.match(r"(\w+):\s*(#.*)?$", line):
            section = match[1]
        elif match := re.match(r"  (\w+):\s*(?:\[.*?\]|[^#]*?)\s*(?:# (.*))?$", line):
            comments[section, match[1]] = match[2] or ""
    return comments
