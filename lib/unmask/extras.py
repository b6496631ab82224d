"""What `pip install unmask` does not bring, see pyproject.toml."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def extra(name: str) -> Iterator[None]:
    """Around imports of what `pip install unmask` does not bring: whoever lacks it reads which extra does."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = error.name.partition(".")[0]
        raise ModuleNotFoundError(f"{package} is not installed: pip install 'unmask[{name}]'") from None
