# Every target makes .venv and installs the package into it when needed. Another interpreter: make PYTHON=python3.12 …
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.unmask-installed
HALF   := $(VENV)/.unmask-installing

.DEFAULT_GOAL := help
.PHONY: help reproduce smoke test test-faults lint lab bench

help:
	@echo "make reproduce  install, run the whole recipe on this machine (preset cpu), print where the report is"
	@echo "make smoke      the same pipeline at toy size, in a few minutes"
	@echo "make test       ruff, then pytest"
	@echo "make test-faults  kill trainings, merges and whole runs at random moments, in about ten minutes"
	@echo "make lint       ruff only"
	@echo "make lab        JupyterLab on the notebooks"
	@echo "make bench      speed and memory against peers, in about twenty minutes: results/benchmarks"

reproduce: $(READY)
	@$(BIN)/unmask run --preset cpu

# Models this small do not fill a core, so two notebooks share the machine.
smoke: $(READY)
	@$(BIN)/unmask run --preset smoke --jobs 2

test: lint
	@$(BIN)/python -m pytest

# Processes that are killed cannot give their semaphores back, which Python would remark at the end.
test-faults: $(READY)
	@UNMASK_FAULTS=1 PYTHONWARNINGS=ignore:resource_tracker:UserWarning $(BIN)/python -m pytest -s tests/faults

lint: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

lab: $(READY)
	@$(BIN)/python -m ipykernel install --sys-prefix --name python3 --display-name "Python 3 (unmask)"
	@$(BIN)/jupyter lab notebooks

# GradCache stands outside of .venv: the training text is made of the installed packages. Offline it is left out.
bench: $(READY)
	@peers=$${UNMASK_ARTIFACTS:-artifacts}/benchmarks/peers; test -d $$peers/gradcache || \
	  $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $$peers gradcache==0.0.1 || \
	  echo "GradCache cannot be installed here, so it will be left out"
	@$(BIN)/python tests/benchmarks/run.py

# The marker HALF exists while pip works: finding it means that an installation was interrupted, so it starts afresh.
$(READY): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "unmask needs Python 3.11 or newer, and '$(PYTHON)' is not: name one, for instance make PYTHON=python3.12" >&2; exit 1; }
	@if [ -e $(HALF) ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo "creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); fi
	@touch $(HALF)
	@echo "installing $$(grep -c '==' requirements.lock) packages into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -e .
	@rm -f $(HALF) && touch $@
