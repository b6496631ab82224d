"""The report's page: notebook 12 without its code. It has no scripts; page.css makes it light or dark as the
reader's system is."""

import re
from html import escape
from pathlib import Path
from string import Template

import nbformat
from nbconvert.exporters import MarkdownExporter
from nbconvert.filters import markdown2html

from unmask.store import write_atomic


def publish(notebook: Path, results: Path) -> list[Path]:
    """Writes report.md and report.html: an executed notebook without its code, without what was printed, and
    without the cells that are tagged "aside". On the HTML page what stands below a heading of the second
    level is folded."""
    content = nbformat.read(notebook, as_version=4)
    content.cells = [cell for cell in content.cells if "aside" not in cell.metadata.get("tags", ())]
    for cell in (cell for cell in content.cells if cell.cell_type == "code"):
        cell.outputs = [output for output in cell.outputs if output.output_type == "display_data"]
        for output in cell.outputs:
            if shown := output.metadata.get("picture"):
                path, alternative = shown
                output.data = {"text/markdown": f'<img alt="{escape(alternative)}" src="{path}">'}
    text, _ = MarkdownExporter(exclude_input=True).from_notebook_node(content)
    text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    page, style = (Path(__file__).with_suffix(kind).read_text(encoding="utf8") for kind in (".html", ".css"))
    title = escape(text.partition("\n")[0].lstrip("# "))
    first, *folded = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    body = markdown2html(first)
    for heading, below in zip(folded[::2], folded[1::2], strict=True):
        body += f"<details><summary>{escape(heading)}</summary>\n{markdown2html(below)}</details>\n"
    html = Template(page).substitute(title=title, style=style, body=body)
    return [write_atomic(results / "report.md", text), write_atomic(results / "report.html", html)]
