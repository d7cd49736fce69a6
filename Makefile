# Everything a newcomer needs: 'make demo' and 'make test' set themselves up.
# Only Python 3.11 or newer, pip and make must be there already.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
STAMP  := $(VENV)/.installed
# Two test processes with one thread each: the suite is made of many small jobs.
JOBS   ?= 2
PYTEST_FLAGS ?=
# Which trials `make faults` draws.
SEED   ?= 0
# Versions of the dependencies: tested (those of constraints.txt), newest, or lowest (the lowest that pyproject.toml allows).
DEPENDENCIES ?= tested
EXTRAS := dev,docs,hub,jax,lm-eval,scorer,serve,tensorboard,triton
# `--minutes N` of a tutorial that is followed becomes so many steps; empty takes the minutes of the page.
STEPS ?= 20

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test faults lint bench docs wheel outside tutorials rehearsal clean

help: ## this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /|/' | awk -F'|' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv and install the tested versions

# torch comes first and with its exact version: otherwise pip may choose a build with gigabytes of GPU libraries.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("error: Python 3.11 or newer is needed (this is %d.%d); set PYTHON=python3.11" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
ifeq ($(DEPENDENCIES),tested)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(EXTRAS)]"
else
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --resolution $(if $(filter lowest,$(DEPENDENCIES)),lowest-direct,highest) -e ".[$(EXTRAS)]"
endif
	@touch $@

demo: $(STAMP) ## generate text from the checkpoint that ships with the package, and show it converging
	@mkdir -p out
	$(BIN)/convergeflow generate --preset sharp --num 4 --nfe 128 --grid closing --trace out/demo --replay out/demo.html
	$(BIN)/convergeflow evaluate stories-small --preset sharp --num 32
	@echo "the flow converging, as a picture: out/demo/trace.png"
	@echo "the same as a replay, to open in a browser: out/demo.html"

serve: $(STAMP) ## the shipped models on http://127.0.0.1:8000, with the page that shows them converge
	$(BIN)/convergeflow serve

test: $(STAMP) ## the whole test suite
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile $(PYTEST_FLAGS)

faults: $(STAMP) ## kill, starve, double, flip and fuzz every command for an hour or two, and print a table; goes on if stopped
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python tests/faults/campaign.py --size full --seed $(SEED) --jobs $(JOBS) --journal 'out/faults-$(SEED)-{code}.jsonl'

lint: $(STAMP) ## style (ruff) and types (mypy)
	$(BIN)/ruff check src tests tools
	$(BIN)/ruff format --check --quiet src tests tools
	$(BIN)/mypy

bench: $(STAMP) ## measure speed and memory on this machine
	$(BIN)/convergeflow bench
	$(BIN)/convergeflow bench startup

docs: $(STAMP) ## the documentation site in build/site, without a warning and without another host
	$(BIN)/python tools/site.py

wheel: $(STAMP) ## build the wheel, install it beside nothing else, and use it from an empty folder
	$(BIN)/python tools/wheel.py

tutorials: $(STAMP) ## follow the README and the tutorials word by word on a fresh clone (after `make wheel`)
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python tools/follow.py --steps "$(STEPS)" --jobs $(JOBS)

rehearsal: $(STAMP) ## the commands of docs/paper-scale.md with small stand-ins on two processes, killed on the way
	$(BIN)/python tests/rehearsal.py

outside: $(STAMP) ## build the wheel and use it from an empty environment: plug-ins, hub folders, lm-eval
	$(BIN)/python tests/outside.py

clean: ## remove .venv and everything that was built (never your runs)
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name '*.egg-info' -prune -exec rm -rf {} +
	find . -name __pycache__ -prune -exec rm -rf {} +
