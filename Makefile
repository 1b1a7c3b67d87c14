# Every target sets itself up: `make test` and `make demo` work as the first command in a fresh clone.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ARGS   ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow lint format types docs bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "asfp needs Python 3.11 or newer; try: make PYTHON=python3.12 ..." >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY) ## prune a ResNet-20 on embedded data, about 2 minutes on 2 cores
	$(BIN)/asfp demo $(ARGS)

test: lint types ## lint, type check, default test suite
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(READY) ## the long tests
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(READY) ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY) ## let ruff fix what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(READY) ## mypy
	$(BIN)/mypy

docs: $(READY) ## the documentation, strictly, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet $(ARGS)

bench: $(READY) ## the cost of one pruning step
	$(BIN)/python benchmarks/prune_step.py

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
