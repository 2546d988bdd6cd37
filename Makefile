PROFILE ?= cpu
export PROFILE
# Compiling torch, SkyRL and vLLM anew in each of many processes takes longer than the tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo train test test-long test-unit simulate drill-all drill-planted check bench lock audit sbom image clean

VENV := .venv/bin
LOCK := $(VENV)/uv pip compile --quiet --no-header --generate-hashes --python-version 3.12
AUDIT := $(VENV)/uv run --quiet --no-project --isolated --python $(VENV)/python --with-requirements requirements/audit.lock
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

help: ## show this
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

install: ## make .venv from the lock of PROFILE (cpu or gpu)
	@scripts/install.sh

demo: install ## train, kill it three times, prove the resumed run equals the uninterrupted one
	@$(VENV)/harness demo configs/demo.yaml

train: install ## train on mazes, then compare base and trained model on held-out ones
	@$(VENV)/harness train configs/train.yaml

test: check ## every check, and every test but the long ones, those on the real stack included
	$(VENV)/pytest -n 2 tests/unit
	$(VENV)/pytest tests/stack

test-long: install ## the tests that CI has no room for: planted defects
	$(VENV)/pytest -m long

test-unit: install ## the tests that take seconds
	$(VENV)/pytest -n 2 tests/unit

simulate: install ## 10,000 simulated runs in which everything goes wrong; SIMULATE="--minutes 60" for longer
	@$(VENV)/python -m tests.simulation $(SIMULATE)

drill-all: install ## every drill, beside an S3 server; runs/drills/all/index.html shows them
	@$(VENV)/python -m harness.weed $(VENV)/harness drill configs/drills --index runs/drills/all

drill-planted: install ## defects planted into drills: each must turn one red, and 20 without must pass; PLANTED="--clean 0" for less
	@$(VENV)/python -m tests.planted $(PLANTED)

check: install ## lint, formatting, types, layers
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy
	$(VENV)/lint-imports --no-cache --no-logo

bench: install ## what checkpoints cost, as ratios; BENCH="--quick --only stop" for less (--help)
	@$(VENV)/python -m benchmarks $(BENCH)

lock: install ## write requirements/*.lock anew; versions stay unless pyproject.toml moves them
	$(LOCK) --group bootstrap --output-file requirements/bootstrap.lock
	$(LOCK) --group audit --output-file requirements/audit.lock
	$(LOCK) --extra cpu --extra dev --output-file requirements/cpu.lock pyproject.toml
	$(LOCK) --extra gpu --extra dev --output-file requirements/gpu.lock pyproject.toml

audit: install ## known vulnerabilities of all that is locked, as osv.dev knows them
	@failed=0; for lock in requirements/*.lock; do echo $$lock; \
	  $(AUDIT) pip-audit --disable-pip --vulnerability-service osv --requirement $$lock || failed=1; done; exit $$failed

sbom: install ## what PROFILE is made of, as CycloneDX: build/sbom-PROFILE.json
	@mkdir -p build
	@$(AUDIT) cyclonedx-py requirements --pyproject pyproject.toml --mc-type application --output-reproducible \
	  --output-format JSON --output-file build/sbom-$(PROFILE).json requirements/$(PROFILE).lock
	@echo build/sbom-$(PROFILE).json

image: ## build the container image of PROFILE
	docker build --build-arg PROFILE=$(PROFILE) --build-arg VERSION=$(VERSION) \
	  --build-arg COMMIT=$$(git rev-parse HEAD) \
	  --build-arg LOCK_SHA256=$$(sha256sum requirements/$(PROFILE).lock | cut -d' ' -f1) \
	  --tag fault-tolerant-rl-harness:$(VERSION)-$(PROFILE) .

clean: ## remove .venv and caches; runs stay
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
