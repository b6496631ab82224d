"""The paper's tables agree with themselves, with one another, and with what the library computes."""

import pytest

from unmask.models.quantize import documents_per_megabyte
from unmask_study.report import paper_table

# Dimensions and precision of what the models return.
STORED = {
    "pplx-embed-v1-4B (INT8)": (2560, "int8"),
    "pplx-embed-v1-4B (BIN)": (2560, "ubinary"),
    "pplx-embed-v1-0.6B (INT8)": (1024, "int8"),
    "pplx-embed-v1-0.6B (BIN)": (1024, "binary"),
    "qwen3-embed-4B": (2560, "float32"),
    "qwen3-embed-0.6B": (1024, "float32"),
    "gemini-embedding-001": (3072, "float32"),
    "text-embedding-3-large": (3072, "float32"),
    "embed-gemma-0.3B": (768, "float32"),
}
# Averages that the paper prints and its own rows do not give, with the mean of these.
MISPRINTED = {(3, "pplx-embed-context-v1-4B (BIN)"): 80.49}


@pytest.mark.parametrize("number", [3, 9, 12])
def test_averages_are_the_mean_of_their_row(number):
    for name, row in paper_table(number).items():
        scores = {name: value for name, value in row.items() if name not in ("Docs/MB", "Source")}
        average = scores.pop("Avg")
        mean = sum(scores.values()) / len(scores)
        if (number, name) in MISPRINTED:
            assert mean == pytest.approx(MISPRINTED[number, name], abs=1e-9) and not rounds(mean, average)
        else:
            assert rounds(mean, average), (number, name, mean, average)


def rounds(value, printed):
    """Whether a value is `printed` to as many decimals as this has, halves either way."""
    unit = 10.0 ** -len(str(printed).partition(".")[2])
    return abs(value - printed) <= unit / 2 + 1e-9


def test_documents_per_megabyte_are_arithmetic():
    expected = {name: documents_per_megabyte(*stored) for name, stored in STORED.items()}
    assert {name: row["Docs/MB"] for name, row in paper_table(1).items()} == expected
