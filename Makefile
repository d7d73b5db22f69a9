# `make demo` and `make test` need nothing but Python >= 3.11: each target sets itself up.
#
#   make test ARGS="tests/ir -k parse"       arguments go to the command behind the target
#   make test JOBS=0                         one process, so that a debugger can be attached
#   make demo PYTHON=python3.12              the interpreter the environment is made with
#   make demo TORCH_INDEX=<url>              the package index that torch alone comes from
#   make demo VENV=/somewhere/else           where the environment lies
#   make test EXTRAS=test-kernels            with Triton (700 MB), so that kernels are tested on a CPU
#   make test EXTRAS=integrations            with torchtitan (16 MB)
VENV ?= .venv
PYTHON ?=
TORCH_INDEX ?=
EXTRAS ?=
ARGS ?=
# One more than there are cores, since tests of time-outs and of processes wait most of their time.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

BIN := $(VENV)/bin
export PYTHON TORCH_INDEX EXTRAS
# Without kept bytecode each worker of pytest rewrites the assertions of all tests anew: 8 s.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint lint-code lint-format lint-types lint-imports format docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make the virtual environment, if it is not there or out of date
	@sh scripts/make-venv "$(VENV)"

demo: setup  ## train a small tensor-parallel model through a verified, overlapped schedule
	@"$(BIN)/interlace" demo $(ARGS)

test: setup  ## run the tests
	@"$(BIN)/python" -m pytest -m "not slow" -n $(JOBS) --maxprocesses=4 --dist loadgroup $(ARGS)

test-slow: setup  ## run the tests that `make test` leaves out as well
	@"$(BIN)/python" -m pytest $(ARGS)

lint: lint-code lint-format lint-types lint-imports  ## lint, format, types, import rules

lint-code: setup
	@"$(BIN)/ruff" check .

lint-format: setup
	@"$(BIN)/ruff" format --check .

lint-types: setup
	@"$(BIN)/pyright" --pythonpath "$(BIN)/python"

lint-imports: setup
	@PYTHONPATH=src "$(BIN)/lint-imports" --no-logo

format: setup  ## fix what ruff can fix
	@"$(BIN)/ruff" check --fix .
	@"$(BIN)/ruff" format .

docs: setup  ## write the generated pages of docs/ again, and build the site into build/site
	@"$(BIN)/python" docs/generate
	@NO_MKDOCS_2_WARNING=1 "$(BIN)/python" -m mkdocs build --strict

clean:  ## remove the environment and all caches
	rm -rf "$(VENV)" "$(VENV).lock" .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist build
