#!/bin/bash
# The first hour on a machine with one GPU: what no other machine can show. Six commands of at most ten minutes each,
# without internet; results/gpu keeps what each says; of `tests`, copy the end of its output.
#
#   papermill_runs/first_gpu.sh tests | kernels | steps [--large] | sharded | decide | recipe
#
# `tests` are the suite's that need a GPU; what the others do: tests/benchmarks/first_gpu.py. `decide` and `recipe` need
# what `unmask prepare --preset gpu` makes on any machine; papermill_runs/README.md says how it is carried. Without .venv the
# python of the path is taken; it needs torch 2.11 and transformers 5.17 at least.
set -eu
cd "$(dirname "$0")/.."
[ -x .venv/bin/python ] && PYTHON="${PYTHON:-.venv/bin/python}"
PYTHON="${PYTHON:-python3}"
unset PYTHONDONTWRITEBYTECODE  # an image may hold no compiled files: the first process makes them for the others
export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-/tmp/pycache}"
export PYTORCH_ALLOC_CONF=expandable_segments:True  # as trainings have it
export PYTHONPATH="lib:tests:tests/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
[ "${1:-}" = tests ] && exec "$PYTHON" -m pytest -q -m gpu tests/models tests/evaluation tests/training
exec "$PYTHON" tests/benchmarks/first_gpu.py "$@"
