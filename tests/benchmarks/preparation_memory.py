"""Peak memory of a preparation, of the main process and of the largest worker, as a line of JSON.

preparation_memory.py SOURCE TOKENIZER      both are JSON: the keys of a Source and of a StoredTokenizer

Not a part of preparation.py, so that no process has more in memory than the preparation itself. The system's
own account (ru_maxrss) would not do: it counts what the parent had in memory before it started the process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from unmask.data import tokenized
from unmask.data.registry import Source
from unmask.data.tokens import StoredTokenizer
from unmask.store import artifacts_root


def peak() -> float:
    """MiB that this process had in memory at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


class Measured(tokenized.TextWork):
    """Notes the peak of the worker that does it, after every unit."""

    def __call__(self, unit):
        result = super().__call__(unit)
        (artifacts_root() / f"{os.getpid()}.peak").write_text(str(peak()))
        return result


def main(source: str, tokenizer: str) -> dict[str, float]:
    stored = json.loads(tokenizer)
    tokenized.TextWork = Measured
    tokenized.prepare_text(
        Source(**json.loads(source)), StoredTokenizer(**stored | {"path": Path(stored["path"])})
    )
    workers = [float(path.read_text()) for path in artifacts_root().glob("*.peak")]
    return {"main process": peak(), "a worker": max(workers), "workers": len(workers)}


if __name__ == "__main__":
    import preparation_memory  # under a name that the workers can import

    print(json.dumps(preparation_memory.main(*sys.argv[1:])))
