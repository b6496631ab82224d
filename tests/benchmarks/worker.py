"""One measurement in a process of its own; its last line of output is JSON.

worker.py speeds CASE                          all programs, in turn
worker.py peak CASE PROGRAM VARIANT STEPS      one program alone: its memory
worker.py gpu STAGE                            a training stage on a GPU
"""

from __future__ import annotations

import json
import sys

import clusters
import contrastive
import diffusion
import encode
import gpu
import measure
import mining
import preparation
import search
import share

CASES = {
    name: case
    for module in (clusters, contrastive, diffusion, encode, mining, preparation, search, share)
    for name, case in module.CASES.items()
}


def main(kind: str, name: str, *rest: str) -> dict:
    if kind == "gpu":
        return gpu.measure(name)
    case = CASES[name]()
    if kind == "speeds":
        facts = {"setting": case.setting, "unit": case.unit, "missing": case.missing}
        return {"facts": facts, "speeds": measure.speeds(case)}
    program, variant, steps = rest
    return measure.peak(case.programs[program][variant], int(steps)) | {"work": case.work, "unit": case.unit}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
