"""The paper presets hold the paper's numbers, and every preset describes the model it says."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from unmask.config import preset_names
from unmask.models import backbone
from unmask.store import repository
from unmask_study import mirror
from unmask_study.estimate import parameters
from unmask_study.evidence import stated
from unmask_study.settings import load_preset

PRESETS = repository() / "papermill_runs" / "presets"
PAPER = ("paper-0.6b", "paper-4b")
PROMPT_TOKENS = 100  # of a reranker's prompt, without query and document

NUMBERS = yaml.safe_load(Path(__file__).with_name("paper_numbers.yaml").read_text(encoding="utf8"))
LARGE = NUMBERS.pop("larger")
PLACES = [(section, place) for section, places in NUMBERS.items() for place in places]


@pytest.mark.parametrize(("section", "place"), PLACES)
def test_the_paper_presets_hold_the_papers_numbers_and_say_where_they_stand(section, place):
    values, comments = NUMBERS[section][place], _comments("paper-0.6b")
    larger = values | {key: value for key, value in LARGE.get(section, {}).items() if key in values}
    for preset, expected in zip(PAPER, (values, larger), strict=True):
        config = getattr(load_preset(preset), section)
        assert json.loads(json.dumps({key: getattr(config, key) for key in values})) == expected
    for key in values:
        assert place.removeprefix("paper, ") in comments[section, key]


@pytest.mark.parametrize("name", [*PAPER, "hub-0.6b"])
def test_every_value_has_a_source(name):
    place = r"(paper|ConTEB|CDE|Qwen3-Embedding), (section|appendix|figure|table) [0-9A-C]"
    source, comments = re.compile(place + r"|choice: \w|Qwen3-\S+-Base|unused"), _comments(name)
    values = yaml.safe_load((PRESETS / f"{name}.yaml").read_text(encoding="utf8"))
    blocks = [*values.pop("study").items(), *values.items()]
    sections = [(key, section) for key, section in blocks if isinstance(section, dict) and key != "ar"]
    assert set(comments) == {(name, key) for name, section in sections for key in section}
    assert not [place for place, comment in comments.items() if not source.match(comment)]


@pytest.mark.parametrize("name", PAPER)
def test_insent_is_trained_as_its_authors_do(name):
    preset = load_preset(name)
    own = preset.conteb
    assert (own.lr, own.lam, own.temperature, preset.contextual.schedule) == (5e-5, 0.1, 0.05, "cosine")
    queries = own.steps * preset.contextual.batch * own.queries_per_document
    assert queries == pytest.approx(2 * 307_241, rel=0.05)  # two epochs of ConTEB's table 3
    assert preset.contextual.warmup == 0.05 * preset.contextual.steps


def test_the_quick_check_reads_no_weights():
    """`make smoke` and `make test` fetch nothing."""
    preset = load_preset("smoke")
    assert not preset.backbone.checkpoint and not mirror.reads_packaged(preset) and not mirror.needs(preset)
    assert mirror.reads_packaged(load_preset("smollm2"))


STATED = {"paper-0.6b": 596e6, "hub-0.6b": 596e6, "paper-4b": 4.02e9, "gpu": 134.5e6}
STATED |= {"cpu": 42.5e6, "scratch": 2.89e6}


@pytest.mark.parametrize(("name", "stated"), STATED.items())
def test_the_stated_size_is_the_models(name, stated):
    preset = load_preset(name)
    with torch.device("meta"):
        model = backbone.build(preset.backbone, Vocabulary(range(preset.data.vocab_size)), seed=0).model
    everything = sum(p.numel() for p in model.parameters())
    assert everything == pytest.approx(stated, rel=0.05 if name == "scratch" else 0.002)
    assert parameters(preset) == (everything, everything - model.get_input_embeddings().weight.numel())


@pytest.mark.parametrize("name", preset_names())
def test_what_loading_does_not_check_fits_the_positions(name):
    preset = load_preset(name)
    asked, reranker = preset.evaluation, preset.reranker
    prompt = PROMPT_TOKENS + reranker.query_length + reranker.document_length
    assert max(asked.query_length, asked.document_length, prompt) <= preset.backbone.max_length


def test_the_default_run_asks_every_claim():
    preset = load_preset("cpu")
    arms = {"diffusion, mean", "AR, mean", "AR, last", *preset.ablation.arms}
    of_07 = [one for one in stated().values() if one["notebook"].startswith("07")]
    assert preset.backbone.checkpoint and {x for one in of_07 for x in (one["ours"], *one["other"])} == arms


class Vocabulary(list):
    """As much of a tokenizer as building a model asks for."""

    pad_token_id = 0


def _comments(name: str) -> dict[tuple[str, str], str]:
    """(section, key) → comment of every `key: value` line within a section of a preset file."""
    comments, section = {}, ""
    for line in (PRESETS / f"{name}.yaml").read_text(encoding="utf8").splitlines():
        if match := re.match(r" *(\w+):\s*(#.*)?$", line):
            section = match[1]
        elif match := re.match(r" +(\w+):\s*(?:\[.*?\]|[^#]*?)\s*(?:# (.*))?$", line):
            comments[section, match[1]] = match[2] or ""
    return comments
