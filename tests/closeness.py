"""Whether computed values agree. In which order a processor sums decides on their last digits."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def assert_close(found: Any, expected: Any, rel: float = 1e-5) -> None:
    """The norm of the difference is at most so large a share of the norm of what is expected.

    Of tensors of one type, arrays and lists of numbers; of dicts and tuples of these, each by its own norm.
    """
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        found, expected = tuple(found[key] for key in expected), tuple(expected.values())
    if isinstance(expected, tuple):
        for pair in zip(found, expected, strict=True):
            assert_close(*pair, rel)
        return
    if torch.is_tensor(found) and torch.is_tensor(expected):
        assert found.dtype == expected.dtype
    found, expected = (torch.as_tensor(x if torch.is_tensor(x) else np.asarray(x)) for x in (found, expected))
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    difference, norm = (found - expected).norm().item(), expected.norm().item()
    assert difference <= rel * norm, f"differs by {difference:.1e}, of a norm of {norm:.1e}"
