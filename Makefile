PROFILE ?= cpu
export PROFILE
# Compiling torch, SkyRL and vLLM anew in each of many processes takes longer than the tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo train test test-unit check lock image clean

VENV := .venv/bin
LOCK := $(VENV)/uv pip compile --quiet --no-header --generate-hashes --python-version 3.12
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

help: ## show this
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

install: ## make .venv from the lock of PROFILE (cpu or gpu)
	@scripts/install.sh

demo: install ## train, kill it three times, prove the resumed run equals the uninterrupted one
	@$(VENV)/harness demo configs/demo.yaml

train: install ## train on mazes, then compare base and trained model on held-out ones
	@$(VENV)/harness train configs/train.yaml

test: check ## every check and every test, those on the real stack included
	$(VENV)/pytest

test-unit: install ## the tests that take seconds
	$(VENV)/pytest tests/unit

check: install ## lint, formatting, types, layers
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/lint-imports --no-cache --no-logo

lock: install ## write requirements/*.lock anew; versions stay unless pyproject.toml moves them
	$(LOCK) --group bootstrap --output-file requirements/bootstrap.lock
	$(LOCK) --extra cpu --extra dev --output-file requirements/cpu.lock pyproject.toml
	$(LOCK) --extra gpu --extra dev --output-file requirements/gpu.lock pyproject.toml

image: ## build the container image of PROFILE
	docker build --build-arg PROFILE=$(PROFILE) --build-arg VERSION=$(VERSION) \
	  --build-arg COMMIT=$$(git rev-parse HEAD) \
	  --build-arg LOCK_SHA256=$$(sha256sum requirements/$(PROFILE).lock | cut -d' ' -f1) \
	  --tag fault-tolerant-rl-harness:$(VERSION)-$(PROFILE) .

clean: ## remove .venv and caches; runs stay
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
