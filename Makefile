# Every target is one line of the README; `make help` lists them. Needs Python 3.11 or newer and pip, nothing else.
VENV ?= .venv
PYTHON ?= $(shell for name in python3.11 python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$name && break; done)
BIN := $(VENV)/bin
VERSION = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
# PYTHON=... of the command line asks for that version, and an environment has one for good.
ifneq ($(filter command environment,$(origin PYTHON)),)
ifneq ($(wildcard $(BIN)/python),)
ifneq ($(call VERSION,$(BIN)/python),$(call VERSION,$(PYTHON)))
$(error $(VENV) holds Python $(call VERSION,$(BIN)/python) and PYTHON=$(PYTHON) is $(call VERSION,$(PYTHON)): \
	name another folder with VENV=.venv-$(call VERSION,$(PYTHON)), or remove $(VENV))
endif
endif
endif
READY := $(VENV)/.ready
TRL := .venv-trl
TRL_READY := $(TRL)/.ready
READERS := .venv-readers
READERS_READY := $(READERS)/.ready
BENCH := outputs/bench
ARGS ?=
PAGES ?= $(wildcard outputs/*/report.html)

.DEFAULT_GOAL := help
# The tests start hundreds of short commands: none compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help setup run test quick format bench gpu lengths browser base screenshots figures notebooks trl trlweights readers families \
	clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## make the virtual environment (.venv) with the tested versions

run: $(READY) ## the quickstart: train with attention weights beside plain DPO; ARGS="key=value ..." changes it
	@$(BIN)/python -m attnpo.fit $(ARGS)

test: $(READY) ## everything CI checks: format, lint, types, all tests with the notebooks
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@types=$$(mktemp) && { $(BIN)/mypy > $$types 2>&1 & typing=$$!; $(BIN)/pytest -n 2; failed=$$?; \
		wait $$typing || failed=1; cat $$types; rm $$types; exit $$failed; }

quick: $(READY) ## the quick tests of every room (tests/quick.txt), in two minutes
	@$(BIN)/pytest -n 2 @tests/quick.txt

format: $(READY) ## rewrite the sources in the house style
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(READY) $(TRL_READY) ## speed and memory beside TRL and the authors' extraction, the short form of docs/performance.md
	@$(BIN)/python -m experiments.benchmarks.step --short --json $(BENCH)/step.json $(ARGS)
	@$(BIN)/python -m experiments.benchmarks.extraction --short --json $(BENCH)/extraction.json $(ARGS)
	@$(BIN)/python -m experiments.benchmarks.pipeline --short --json $(BENCH)/pipeline.json $(ARGS)
	@$(BIN)/python -m experiments.benchmarks.start --short --json $(BENCH)/start.json $(ARGS)
	@echo && $(BIN)/python -m experiments.benchmarks.harness $(foreach part,step extraction pipeline start,$(BENCH)/$(part).json)

gpu: $(READY) ## what one GPU makes of it at 8B, in 8 minutes: tests, step, judge, TRL, a run; ARGS=--tiny on any machine
	@$(BIN)/python -m experiments.benchmarks.gpu --json $(BENCH)/gpu.json $(ARGS)

lengths: $(READY) ## how a step's time and memory grow from 2k to 16k tokens, on one CPU thread; ARGS="--lengths 2048 4096"
	@$(BIN)/python -m experiments.benchmarks.step_length $(ARGS)

browser: $(READY) ## the weight explorer at its full size in headless Chromium: its bytes, the seconds it takes to open
	@$(BIN)/pytest -s tests/display/large_explorer.py

base: $(READY) ## build the testbed's base for two seeds, and hold its judge to the recipe's gate
	@$(BIN)/pytest -n 2 -rP tests/lab/testbed/real_base.py

screenshots: $(READY) ## pictures of pages and terminals, in outputs/screenshots; PAGES="FILE.html ..." chooses the pages
	@$(BIN)/python -m experiments.pages.screenshots outputs/screenshots $(PAGES)
	@$(BIN)/python -m tests.display.terminals outputs/screenshots

figures: $(READY) ## the README's picture of one pair, made anew; experiment=why makes the other (docs/results_labels.md)
	@$(BIN)/python -m experiments.pages.judge_to_loss

notebooks: $(READY) ## execute the notebooks and write them back with their outputs; ARGS="06_theory ..." some
	@$(BIN)/python -m experiments.pages.notebooks $(ARGS)

trl: $(TRL_READY) ## the environment of the benchmarks' opponent (.venv-trl): TRL beside the same torch

trlweights: $(READY) $(TRL_READY) ## TRL's trainer on exported weights: its first ten losses beside ours
	@$(BIN)/pytest tests/run/test_weight_export.py -k trl

readers: $(READERS_READY) ## read an exported folder with transformers 4.x, which many vLLM versions bring (.venv-readers)
	@$(BIN)/pytest tests/training/test_readers.py

families: $(READY) ## hold every causal language model class of transformers, built tiny, to the library's own numbers
	@$(BIN)/python -m tests.conformance families $(ARGS)

clean: ## remove the virtual environments and the tools' caches (runs in outputs/ stay)
	rm -rf $(VENV) $(TRL) $(READERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

# torch goes first: a build that is already at hand (CPU-only, or for this GPU's driver) is then kept by what follows.
# -qq: pip says nothing about package indexes that lack a package; its errors still show. An older pip takes half as long
# again. --no-compile: of 23,000 files the commands read 4,000, which an import of $(2) compiles. It must be done: where
# PYTHONDONTWRITEBYTECODE is set, as in many containers, every command would compile torch and transformers anew, ten
# seconds each.
compiled = $(1)/bin/python -c "import $(2)"
USED := attnpo.run.training, attnpo.weigher, datasets, matplotlib.figure, pandas

$(READY): setup.cfg pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "attnpo needs Python 3.11 or newer: neither python3.11 nor python3 on the PATH is;" \
		"name one with make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setting up $(VENV) with $$($(PYTHON) --version) ..."
	@start=$$(date +%s) && \
		{ test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); } && \
		{ $(BIN)/python -m pip install -qq --no-compile "pip>=25" || :; } && \
		$(BIN)/python -m pip install -qq --no-compile -c constraints.txt torch && \
		$(BIN)/python -m pip install -qq --no-compile -c constraints.txt -e '.[dev,notebooks,eval]' && \
		$(call compiled,$(VENV),$(USED)) && \
		echo "set up in $$(( $$(date +%s) - start )) s; to type commands yourself: . $(BIN)/activate" && touch $@

# What has other versions than ours or is no dependency stays out of the project's own environment: $(1) is a folder with
# the same torch and what pip is told by $(2), in which $(3) is imported. The folder ignores itself, for git and for ruff.
define beside
	@echo "setting up $(1) ..."
	@$(BIN)/python -m venv $(1) && echo '*' > $(1)/.gitignore && \
		torch=$$($(BIN)/python -c "from importlib.metadata import version; print(version('torch').partition('+')[0])") && \
		$(1)/bin/python -m pip install -qq --no-compile -c constraints.txt "torch==$$torch" && \
		$(1)/bin/python -m pip install -qq --no-compile $(2) && \
		$(call compiled,$(1),$(3)) && touch $@
endef

$(TRL_READY): $(READY)
	$(call beside,$(TRL),-c constraints.txt trl==1.16.0,trl.trainer.dpo_trainer)

$(READERS_READY): $(READY)
	$(call beside,$(READERS),transformers==4.54.1,transformers.models.llama.modeling_llama)
