# Every target makes .venv and installs the package into it when needed. Another interpreter: make PYTHON=python3.12 …
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.unmask-installed
HALF   := $(VENV)/.unmask-installing

.DEFAULT_GOAL := help
.PHONY: help reproduce smoke test lint lab

help:
	@echo "make reproduce  install, run the whole recipe on this machine (preset cpu), print where the report is"
	@echo "make smoke      the same pipeline at toy size, in a few minutes"
	@echo "make test       ruff, then pytest"
	@echo "make lint       ruff only"
	@echo "make lab        JupyterLab on the notebooks"

reproduce: $(READY)
	@$(BIN)/unmask run --preset cpu

smoke: $(READY)
	@$(BIN)/unmask run --preset smoke

test: lint
	@$(BIN)/python -m pytest

lint: $(READY)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

lab: $(READY)
	@$(BIN)/python -m ipykernel install --sys-prefix --name python3 --display-name "Python 3 (unmask)"
	@$(BIN)/jupyter lab notebooks

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
