# Every target is one line of the README; `make help` lists them. Needs Python 3.11 or newer and pip, nothing else.
VENV ?= .venv
PYTHON ?= $(shell for name in python3.11 python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRL := .venv-trl
TRL_READY := $(TRL)/.ready
BENCH := outputs/bench
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup run test quick format bench trl clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## make the virtual environment (.venv) with the tested versions

run: $(READY) ## the quickstart: train with attention weights beside plain DPO; ARGS="key=value ..." changes it
	@$(BIN)/python -m attnpo.fit $(ARGS)

test: $(READY) ## everything CI checks: format, lint, types, all tests with the notebooks
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/pytest -n 2

quick: $(READY) ## the tests that are not marked slow
	@$(BIN)/pytest -n 2 -m "not slow"

format: $(READY) ## rewrite the sources in the house style
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(READY) $(TRL_READY) ## speed and memory beside TRL and the authors' extraction, the short form of docs/performance.md
	@$(BIN)/python -m experiments.benchmarks.step --short --json $(BENCH)/step.json $(ARGS)
	@$(BIN)/python -m experiments.benchmarks.extraction --short --json $(BENCH)/extraction.json $(ARGS)
	@$(BIN)/python -m experiments.benchmarks.pipeline --short --json $(BENCH)/pipeline.json $(ARGS)
	@echo && $(BIN)/python -m experiments.benchmarks.harness $(BENCH)/step.json $(BENCH)/extraction.json $(BENCH)/pipeline.json

trl: $(TRL_READY) ## the environment of the benchmarks' opponent (.venv-trl): TRL beside the same torch

clean: ## remove the virtual environments and the tools' caches (runs in outputs/ stay)
	rm -rf $(VENV) $(TRL) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

# torch goes first: a build that is already at hand (CPU-only, or for this GPU's driver) is then kept by what follows.
# -qq: pip says nothing about package indexes that lack a package; its errors still show.
$(READY): setup.cfg pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "attnpo needs Python 3.11 or newer: neither python3.11 nor python3 on the PATH is;" \
		"name one with make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version) ..."
	@start=$$(date +%s) && \
		{ test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); } && \
		$(BIN)/python -m pip install -qq -c constraints.txt torch && \
		$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev,notebooks]' && \
		echo "set up in $$(( $$(date +%s) - start )) s" && touch $@

# TRL stays out of the project's own environment. The folder ignores itself, for git and for ruff.
$(TRL_READY): $(READY)
	@echo "setting up $(TRL) ..."
	@$(BIN)/python -m venv $(TRL) && echo '*' > $(TRL)/.gitignore && \
		torch=$$($(BIN)/python -c "from importlib.metadata import version; print(version('torch').partition('+')[0])") && \
		$(TRL)/bin/python -m pip install -qq -c constraints.txt "torch==$$torch" && \
		$(TRL)/bin/python -m pip install -qq -c constraints.txt trl==1.16.0 && touch $@
