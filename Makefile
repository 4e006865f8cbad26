# Everything a newcomer or CI needs: `make demo`, `make test`. Both install into .venv first, once per change of
# pyproject.toml or constraints-cpu.txt. Plain `make` lists the targets.
#
#   PYTHON           the interpreter that .venv is made from (3.11 or newer; gpu-test runs in it directly)
#   TORCH_INDEX_URL  where torch alone comes from, for a CPU-only build where the default index has CUDA builds:
#                    make demo TORCH_INDEX_URL=<index of CPU builds that pytorch.org names>
#   WORKERS          processes of the test run: more than two cores, since many tests wait
#   GPU_TEST         options of pytest for gpu-test, such as GPU_TEST="-n 8 --dist worksteal"
#
# `make engine-test` has an environment of its own, .venv-engine, since vLLM pins other versions.
# `make gpu-test` and `make sanitize` install nothing; `make clean` removes both environments too.

PYTHON ?= python3
TORCH_INDEX_URL ?=
WORKERS ?= 4
GPU_TEST ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Hundreds of processes import the same files.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
TORCH := $(shell grep '^torch==' constraints-cpu.txt)
INPUTS := $(shell { pwd; cat pyproject.toml constraints-cpu.txt; } | sha256sum | cut -c1-16)
STAMP := $(VENV)/.installed-$(INPUTS)
ENGINE_VENV := .venv-engine
ENGINE_INPUTS := $(shell { pwd; cat pyproject.toml constraints-engine.txt; } | sha256sum | cut -c1-16)
ENGINE_STAMP := $(ENGINE_VENV)/.installed-$(ENGINE_INPUTS)

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test engine-test setup lint format gpu-test sanitize clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP) ## run every format on 4 ranks, no GPU needed
	@$(BIN)/python -m moe_runtime.launch.demo

# In the order of tests/conftest.py: the longest files come first.
test: lint ## lint, types and all tests that need no GPU
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Its own conftest alone: that of the other tests sets up what vLLM must not have.
engine-test: $(ENGINE_STAMP) ## the adapter inside vLLM on CPUs, installed into .venv-engine
	$(ENGINE_VENV)/bin/python -m pytest tests/engine --confcutdir=tests/engine --timeout 900

setup: $(STAMP) ## install into .venv

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# In the current environment, nothing installed: a GPU machine has its own torch, triton and NVSHMEM.
gpu-test: ## run the GPU tests in the current environment
	$(PYTHON) -m pytest -m "not cpu_only" $(GPU_TEST)

# The kernels under compute-sanitizer, in the current environment too.
sanitize: ## run the kernels under compute-sanitizer in the current environment
	$(PYTHON) -m moe_runtime.launch.sanitize

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) $(ENGINE_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by its exact version: left to a resolver it may drag in several GB of CUDA packages.
# A CUDA build of torch brings the triton it was made with; then that one stays, and the pin of triton is left out.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) '$(TORCH)'
	@if $(BIN)/python -c 'import triton' 2>/dev/null && ! $(BIN)/python -c 'import torch, sys; sys.exit(torch.version.cuda is not None)'; \
		then grep -v '^triton==' constraints-cpu.txt; else cat constraints-cpu.txt; fi > $(VENV)/constraints.txt
	$(BIN)/python -m pip install --quiet -c $(VENV)/constraints.txt -e '.[dev,hf,bench]'
	@rm -f $(VENV)/.installed-*
	@touch $@

# Every package by its exact version and nothing else, so that nothing is resolved.
$(ENGINE_STAMP):
	$(PYTHON) -m venv $(ENGINE_VENV)
	$(ENGINE_VENV)/bin/python -m pip install --quiet $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) --no-deps '$(TORCH)'
	$(ENGINE_VENV)/bin/python -m pip install --quiet --no-deps -r constraints-engine.txt
	$(ENGINE_VENV)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@rm -f $(ENGINE_VENV)/.installed-*
	@touch $@
