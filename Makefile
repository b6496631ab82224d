# Every target makes .venv and installs the package into it when needed. Another interpreter: make PYTHON=python3.12 …
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.unmask-installed
HALF   := $(VENV)/.unmask-installing
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install reproduce smoke rehearse test test-faults lint lab bench

help:
	@echo "make install    .venv with everything that was tested together, and the package itself"
	@echo "make reproduce  run the whole recipe on this machine (preset gpu where nvidia-smi lists a GPU, else cpu),"
	@echo "                print where the report is; PRESET=smollm2 TO=02: another preset, no further than notebook 02"
	@echo "make smoke      the same pipeline at toy size, in a few minutes"
	@echo "make rehearse   the presets that read the Hub, on made-up data and small models, on one and two processes"
	@echo "make test       ruff, which part of the library may import which, then pytest"
	@echo "make test-faults  kill trainings, and whatever else writes files, at random moments; FAULTS=100 times"
	@echo "make lint       ruff, and which part of the library may import which"
	@echo "make lab        JupyterLab on the notebooks, which train in view; LAB=… is handed on, for instance"
	@echo "                LAB='--no-browser --port=8890'"
	@echo "make bench      speed and memory against peers, in about an hour: results/benchmarks"

install: $(READY)

# make reproduce PRESET=smollm2 TO=02: another preset, and no further than to this notebook
PRESET ?= $(if $(GPUS),gpu,cpu)
GPUS = $(shell nvidia-smi -L 2>/dev/null | grep -c "^GPU [0-9]" | grep -v "^0")
WHY = $(if $(filter file,$(origin PRESET)),nvidia-smi lists $(or $(GPUS),no) GPU; PRESET= names another,as named)
# Two notebooks side by side, a thread each, train no more tokens a second than one with two threads.
JOBS ?= 1
reproduce: $(READY)
	@echo "preset $(PRESET): $(WHY)"
	@$(BIN)/unmask run --preset $(PRESET) --jobs $(JOBS) $(if $(TO),--to $(TO))

smoke: $(READY)
	@$(BIN)/unmask run --preset smoke --jobs 2 --force

rehearse: $(READY)
	@$(BIN)/python tests/rehearsal.py

# A test's models are too small for more than one thread, so several tests share the machine.
test: lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist worksteal

# Processes that are killed cannot give their semaphores back, which Python would remark at the end.
FAULTS ?= 24
test-faults: $(READY)
	@UNMASK_FAULTS=$(FAULTS) PYTHONWARNINGS=ignore:resource_tracker:UserWarning $(BIN)/python -m pytest -s tests/faults

lint: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports --no-cache

# Kernels train, so they get the settings of memory that `unmask run` gives its own. Progress bars are plain text, as in
# the executed notebooks. The versions are pinned: no question about news of others. Kernels run in notebooks/, so that
# paths in the environment have to be absolute.
SETTINGS := from unmask.children import ENVIRONMENT; print(*(f"--env {name} {value}" for name, value in ENVIRONMENT.items()))
lab: $(READY)
	@$(BIN)/python -m ipykernel install --sys-prefix --name python3 --display-name "Python 3 (unmask)" \
	  $$($(BIN)/python -c '$(SETTINGS)') \
	  --env PYTHONWARNINGS "ignore:IProgress not found" >/dev/null
	@mkdir -p $(VENV)/share/jupyter/lab/settings
	@echo '{"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": false}}' \
	  >$(VENV)/share/jupyter/lab/settings/overrides.json
	@UNMASK_ARTIFACTS="$${UNMASK_ARTIFACTS:+$$(realpath -m "$$UNMASK_ARTIFACTS")}" \
	  UNMASK_MIRROR="$${UNMASK_MIRROR:+$$(realpath -m "$$UNMASK_MIRROR")}" \
	  UNMASK_CORPUS="$${UNMASK_CORPUS:+$$(realpath -m "$$UNMASK_CORPUS")}" \
	  $(BIN)/jupyter lab --preferred-dir=notebooks $(LAB)

# GradCache stands outside of .venv, which holds what was tested together. Offline it is left out.
bench: $(READY)
	@peers=$${UNMASK_ARTIFACTS:-artifacts}/benchmarks/peers; test -d $$peers/gradcache || \
	  $(PIP) --no-deps --target $$peers gradcache==0.0.1 || \
	  echo "GradCache cannot be installed here, so it will be left out"
	@PYTHONPATH=tests $(BIN)/python tests/benchmarks/run.py

# The marker HALF exists while pip works: finding it means that an installation was interrupted, so it starts afresh.
# Pip keeps one core busy: four at once share the list, then all cores compile (some packages hold files that are no
# Python). The last one also adds what this machine's build of torch needs besides.
$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "unmask needs Python 3.11 or newer, and '$(PYTHON)' is not: name one, for instance make PYTHON=python3.12" >&2; exit 1; }
	@if [ -e $(HALF) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo "creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(HALF)
	@echo "installing $$(grep -c '==' requirements.lock) packages into $(VENV) (a few minutes the first time)"
	@sed '/^#/d' requirements.lock | xargs -n 46 -P 4 $(PIP) --no-deps --no-compile
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	@$(PIP) -e .
	@rm -f $(HALF) && touch $@
