"""What the recipe starts from, in words; and all of it as a picture, a box for each notebook, for light and
for dark pages."""

from pathlib import Path
from string import Template

from unmask.config import BackboneConfig
from unmask.data import hub

LIGHT = {"box": "#eef3fa", "line": "#6b7f99", "ink": "#1f2933", "muted": "#5b6b7d"}
DARK = {"box": "#17212e", "line": "#8295ab", "ink": "#e6edf3", "muted": "#9fb0c3"}
HERE = "#n{} .box {{fill: #0072b2; stroke: #0072b2}} #n{} .name, #n{} .told {{fill: #ffffff}}"


def recipe(notebook: str = "", *, dark: bool = False) -> str:
    """The picture as SVG.

    Args:
        notebook: whose box stands out, for instance "02_pair"; one that is no stage of the recipe has none.
    """
    drawn = Template(Path(__file__).with_suffix(".svg").read_text(encoding="utf8"))
    here = HERE.format(*3 * [notebook.partition("_")[0]]) if notebook else ""
    return drawn.substitute(DARK if dark else LIGHT, here=here)


def origin(config: BackboneConfig) -> str:
    """What the recipe starts from, in a few words for a page."""
    if not config.checkpoint:
        return "trained from scratch"
    packaged = config.checkpoint == hub.PACKAGED
    start = "SmolLM2-135M-Instruct, four-bit weights" if packaged else config.checkpoint
    if not (numbers := config.keep_layers):
        return start
    first = numbers == tuple(range(len(numbers)))
    return f"{start}, cut to its {f'first {len(numbers)} layers' if first else f'layers {numbers}'}"
