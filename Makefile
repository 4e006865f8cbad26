# Everything a newcomer or CI needs: `make demo`, `make test`. Both install into .venv first, once per change of
# pyproject.toml or constraints-cpu.txt. Plain `make` lists the targets.
#
#   PYTHON           the interpreter that .venv is made from (3.11 or newer; gpu-test runs in it directly)
#   TORCH_INDEX_URL  where torch alone comes from, for a CPU-only build where the default index has CUDA builds:
#                    make demo TORCH_INDEX_URL=<index of CPU builds that pytorch.org names>
#   WORKERS          processes of the test run: more than two cores, since many tests wait
#   CONSTRAINTS      versions that .venv gets; constraints-oldest.txt has the oldest that pyproject.toml allows
#   VENV             the environment, so that one of other versions can lie beside it
#   GPU_TEST         options of pytest for gpu-test, such as GPU_TEST="-n 8 --dist worksteal"
#
# `make engine-test` has an environment of its own, .venv-engine, since vLLM and SGLang pin other versions.
# `make gpu-test` and `make sanitize` install nothing; `make clean` removes both environments too.

PYTHON ?= python3
TORCH_INDEX_URL ?=
WORKERS ?= 6
GPU_TEST ?=
CONSTRAINTS ?= constraints-cpu.txt
VENV ?= .venv

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Hundreds of processes import the same files.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
TORCH := $(shell grep '^torch==' $(CONSTRAINTS))
INPUTS := $(shell { pwd; cat pyproject.toml $(CONSTRAINTS); } | sha256sum | cut -c1-16)
STAMP := $(VENV)/.installed-$(INPUTS)
ENGINE_VENV := .venv-engine
ENGINE_INPUTS := $(shell { pwd; cat pyproject.toml constraints-engine.txt; } | sha256sum | cut -c1-16)
ENGINE_STAMP := $(ENGINE_VENV)/.installed-$(ENGINE_INPUTS)

PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Files of tests/models by subject; what is named in neither list is of checkpoints.
models = $(wildcard $(1:%=tests/models/test_%.py))
unit = $(1:%=tests/unit/test_%.py)
exchange = $(1:%=tests/exchange/test_%.py)
kernels = $(1:%=tests/kernels/test_%.py)
ENGINES := $(call models,engine_* transformers* vllm_* expert_modules greedy_families published_kinds read_or_refused)
LAYERS := $(call models,layer* rebalance* experts full_size_layers step token_buckets)
CHECKPOINTS := $(filter-out $(ENGINES) $(LAYERS),$(call models,*))
# These skip where there are no sources of engines.
READ_SOURCES := $(call models,engine_parts engine_signatures) tests/deep_ep/test_callers.py
# Cheap, and of each subject what most mistakes break.
QUICK := $(call unit,arguments config formats import_graph placement router weights) $(call models,checkpoint layer) \
    $(call exchange,num_sms one_rank one_rank_emulated) $(call kernels,bits gemm_arguments gemm_plan op_arguments swizzle)

.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo test quick test-exchange test-gemm test-layers test-checkpoints test-engines test-tools engine-test setup lint format gpu-test sanitize clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(STAMP) ## run every format on 4 ranks, no GPU needed
	@$(BIN)/python -m moe_runtime.launch.demo

# In the order of tests/conftest.py: the longest files come first.
test: lint ## lint, types and all tests that need no GPU
	$(PYTEST)

quick: $(STAMP) ## in a minute: ruff, and the tests that find most mistakes soonest
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(QUICK)

# By subject; CONTRIBUTING.md says which after a change of what.
test-exchange: $(STAMP) ## dispatch and combine, heaps, transports, protocol, deep_ep
	$(PYTEST) tests/exchange tests/protocol tests/deep_ep

test-gemm: $(STAMP) ## kernels against their references, ahead-of-time compilation
	$(PYTEST) tests/kernels

test-layers: $(STAMP) ## layers, router, config, placement
	$(PYTEST) tests/unit $(LAYERS)

test-checkpoints: $(STAMP) ## reading, converting and keeping checkpoints
	$(PYTEST) $(CHECKPOINTS)

test-engines: $(STAMP) ## transformers models, adapters of vLLM and SGLang
	$(PYTEST) $(ENGINES)

test-tools: $(STAMP) ## programs, docs, packaging, import graph
	$(PYTEST) tests/cli $(call unit,examples import_graph packaging readme subjects)

# Its own conftest alone: that of the other tests sets up what engines must not have. Before, what only reads sources.
engine-test: $(STAMP) $(ENGINE_STAMP) ## the adapters inside vLLM and SGLang on CPUs, installed into .venv-engine
	site=$$($(ENGINE_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		MOE_RUNTIME_VLLM_SOURCES=$$site MOE_RUNTIME_SGLANG_SOURCES=$$site $(BIN)/python -m pytest $(READ_SOURCES)
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
	$(PYTHON) -m pytest -m "not cpu_only" --durations=10 $(GPU_TEST)

# The kernels under compute-sanitizer, in the current environment too.
sanitize: ## run the kernels under compute-sanitizer in the current environment
	$(PYTHON) -m moe_runtime.launch.research.sanitize

clean: ## remove .venv, caches and build output
	rm -rf $(VENV) $(ENGINE_VENV) build dist *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by its exact version: left to a resolver it may drag in several GB of CUDA packages.
# A CUDA build of torch brings the triton it was made with; then that one stays, and the pin of triton is left out.
$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) '$(TORCH)'
	@if $(BIN)/python -c 'import triton' 2>/dev/null && ! $(BIN)/python -c 'import torch, sys; sys.exit(torch.version.cuda is not None)'; \
		then grep -v '^triton==' $(CONSTRAINTS); else cat $(CONSTRAINTS); fi > $(VENV)/constraints.txt
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
