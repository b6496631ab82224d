"""The report of a run: its notebook 12a without the code, as Markdown and as HTML."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

import nbformat
from nbconvert.exporters import MarkdownExporter
from nbconvert.filters import markdown2html

from unmask.store import write_atomic

NOTEBOOK = "12a_page"


def publish(notebook: Path, results: Path) -> list[Path]:
    """Writes report.md and report.html: an executed notebook without its code, without what was printed, and
    without the cells that are tagged "aside"."""
    content = nbformat.read(notebook, as_version=4)
    content.cells = [cell for cell in content.cells if "aside" not in cell.metadata.get("tags", ())]
    for cell in (cell for cell in content.cells if cell.cell_type == "code"):
        cell.outputs = [output for output in cell.outputs if output.output_type == "display_data"]
        for output in cell.outputs:
            if shown := output.metadata.get("picture"):
                output.data = {"text/markdown": picture(*shown)}
    text, _ = MarkdownExporter(exclude_input=True).from_notebook_node(content)
    text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    written = {"report.md": text, "report.html": page(text, text.partition("\n")[0].lstrip("# "))}
    return [write_atomic(results / name, whole) for name, whole in written.items()]


def page(markdown: str, title: str) -> str:
    """A Markdown text as an HTML page: light or dark as the reader's system is, for any width, no scripts."""
    style = Path(__file__).with_name("report.css").read_text(encoding="utf8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"{markdown2html(markdown)}</body>\n</html>\n"
    )


def picture(path: str, text: str) -> str:
    """HTML, also for Markdown, that shows what a figure's `save` wrote, in the variant for the reader's page.

    Example:
        >>> picture("figures/loss.png", "Training loss")  # doctest: +NORMALIZE_WHITESPACE
        '<picture><source media="(prefers-color-scheme: dark)" srcset="figures/loss-dark.png"><img
        alt="Training loss" src="figures/loss.png"></picture>'
    """
    dark = path.removesuffix(".png") + "-dark.png"
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img alt="{escape(text)}" src="{path}"></picture>'
    )
