# `make train` and `make test` need Python >= 3.11 and nothing else: the first call makes .venv (scripts/setup.sh).
SHELL := bash
BIN := .venv/bin
export PYTHONPATH := $(CURDIR)
# Overrides of `make train`, options of `make test`: make train ARGS="train.steps=50 optim.lr=1e-3"
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup train test test-gpu check lint types imports readme format clean

help: ## Say what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'

setup: ## Make .venv, or bring it up to date
	@bash scripts/setup.sh

train: setup ## Train the demo: 2 processes on CPU, or all GPUs
	@bash scripts/demo.sh $(ARGS)

test: setup ## Run the tests that need no GPU
	@bash scripts/test.sh $(ARGS)

test-gpu: setup ## Run the tests that need GPUs
	$(BIN)/python -m pytest tests/gpu $(ARGS)

check: lint types imports readme ## Check style, types, import direction and README (all: make -k check)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/python -m pyright

imports: setup
	$(BIN)/lint-imports

readme: setup
	$(BIN)/python scripts/check_readme.py

format: setup ## Format the code and mend what ruff can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove caches and build products; .venv and runs/ stay
	rm -rf build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
