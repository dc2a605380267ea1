# `make` lists what can be done. Every target makes the environment first and reuses it afterwards.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
TRL_VENV := benchmarks/.venv-trl
TRL_READY := $(TRL_VENV)/.ready
PYTEST_ARGS ?=
BENCH_ARGS ?=

# One thread: two on a busy two-core machine make the small tensors of the default many times slower.
# Two workers, a file at a time: module fixtures hold whole sweeps.
PYTEST := -m pytest -n 2 --dist loadfile
RUN := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: help env demo test test-slow test-all lint types check format dist bench clean distclean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(READY) ## create .venv and install ablate into it, at the versions of constraints.txt

demo: $(READY) ## train 4 arms (clip x tis) of the default on this machine, and print what was found
	@echo "== demo: a sweep of 4 arms, clip=sym,asym x tis=on,off, into outputs/"
	$(PY) -m ablate.run -m clip=sym,asym tis=on,off

test: $(READY) ## run the fast tests
	@echo "== test: everything but the slow and the GPU tests"
	$(RUN) $(PY) $(PYTEST) -m "not slow and not gpu" $(PYTEST_ARGS)

test-slow: $(READY) ## run the slow tests: they train, launch and resume
	@echo "== test-slow: the tests that train, launch and resume"
	$(RUN) $(PY) $(PYTEST) -m "slow and not gpu" $(PYTEST_ARGS)

test-all: $(READY) ## run all tests; those that need a missing device or program skip
	@echo "== test-all: every test"
	$(RUN) $(PY) $(PYTEST) $(PYTEST_ARGS)

lint: $(READY) ## check style and layout with ruff
	@echo "== lint: ruff"
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(READY) ## check types with mypy
	@echo "== types: mypy"
	$(VENV)/bin/mypy

check: lint types test ## lint, types and the fast tests

format: $(READY) ## lay out the code and mend what ruff safely can
	@echo "== format: ruff"
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

dist: $(READY) ## build the sdist and the wheel into dist/
	@echo "== dist: sdist and wheel"
	rm -rf dist
	$(PY) -m hatchling build -d dist

bench: $(READY) $(TRL_READY) ## time one rollout step beside TRL's GRPOTrainer (BENCH_ARGS="--rounds 5")
	@echo "== bench: one rollout step of ablate, TRL with ZeRO-3 and TRL alone, interleaved, one thread"
	$(RUN) $(PY) benchmarks/rollout_step.py $(BENCH_ARGS)

clean: ## remove caches and build outputs; keeps .venv and outputs/
	@echo "== clean: caches and build outputs"
	rm -rf dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name .venv-trl -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## remove the environments too; keeps outputs/
	@echo "== distclean: .venv and $(TRL_VENV)"
	rm -rf $(VENV) $(TRL_VENV)

# $(1): folder of the environment. Debian's python3 has no ensurepip until python3-venv is installed.
define make_venv
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "ablate needs Python 3.11 or newer; $(or $(PYTHON),python3) is not. Try: make PYTHON=/path/to/python3.11"; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null \
		|| { echo "$(PYTHON) cannot make environments. On Debian: apt install python3-venv"; exit 1; }
	@test -x $(1)/bin/pip || "$(PYTHON)" -m venv $(1)
endef

$(READY): pyproject.toml constraints.txt
	@echo "== env: installing ablate and its tools into $(VENV) (1.6 GB, 2 to 3 minutes the first time)"
	$(call make_venv,$(VENV))
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(TRL_READY): benchmarks/requirements-trl.txt
	@echo "== bench: installing TRL into $(TRL_VENV), apart from our own environment"
	$(call make_venv,$(TRL_VENV))
	$(TRL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@
