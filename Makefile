# regrasp: `make demo` shows it, `make test` proves it. Both set up everything they need.
SHELL := /bin/bash
.DEFAULT_GOAL := help
BIN := .venv/bin
ARGS ?=

# Headless rendering; nothing is downloaded at run time; no more threads than two cores feed
# (spawned workers use one each).
export MUJOCO_GL ?= egl
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
THREADS := $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 2 ? cores : 2)))
export OMP_NUM_THREADS ?= $(THREADS)
export OPENBLAS_NUM_THREADS ?= $(THREADS)
export MKL_NUM_THREADS ?= $(THREADS)

.PHONY: help setup demo test lint format lock docs

help: ## what there is to make
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

setup: ## the environment in .venv (idempotent; every target below does it)
	@scripts/bootstrap.sh

demo: setup ## perturbed LIBERO episodes without and with the supervisor, and a report (ARGS="...")
	$(BIN)/regrasp demo $(ARGS)

test: setup lint ## lint, then every test (ARGS="tests/sim -k snapshot" to choose)
	$(BIN)/python -m pytest $(ARGS)

lint: setup ## style, import rules, and types on the installed wheel
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m regrasp.scripts.check_types

format: setup ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## the results page, from docs/results/*.json
	$(BIN)/python -m regrasp.scripts.docs_tables

lock: setup ## resolve pyproject.toml again into requirements.lock
	uv pip compile pyproject.toml --all-extras --python-version 3.12 --overrides overrides.txt \
		--generate-hashes --no-emit-index-url --no-header --quiet -o requirements.lock
