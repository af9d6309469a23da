# Everything a developer or a curious user runs. Each target starts from Python 3.11+ and pip alone:
# it makes .venv itself, and finds it ready the next time.

SHELL := /bin/bash
BIN := .venv/bin
# Tests start Python again and again: what it compiles is kept, whatever the shell asks for.
export PYTHONDONTWRITEBYTECODE :=

# A name on PATH may be a shim with nothing behind it, so each candidate has to run.
first_python = for p in $(1); do \
  if "$$p" -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
  then echo "$$p"; break; fi; done
PYTHON ?= $(shell $(call first_python,python3.11 python3.12 python3.13 python3 \
  $(wildcard $(HOME)/.pyenv/versions/3.1[123]*/bin/python)))
PYTHON313 ?= $(shell $(call first_python,python3.13 \
  $(wildcard $(HOME)/.pyenv/versions/3.13*/bin/python)))

.DEFAULT_GOAL := help
.PHONY: help demo test test-ci test-all smoke lint mypy pyright format bench figures docs clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' Makefile

demo: .venv/.demo  ## plan and train a byte-level GPT on 8 virtual CPU devices
	@$(BIN)/autopar demo

test: .venv/.test  ## the default tests, then the smoke set on Python 3.13 where there is one
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"
	@$(MAKE) --no-print-directory smoke

test-ci: .venv/.test  ## the slow tests that a change must pass, too: kills, jobs, the documentation
	$(BIN)/python -m pytest -n 2 --dist worksteal -m ci

test-all: .venv/.test  ## the default tests and the slow cross product
	$(BIN)/python -m pytest -n 2 --dist worksteal
	@$(MAKE) --no-print-directory smoke

ifneq ($(PYTHON313),)
smoke: .venv313/.test  ## the smoke set on Python 3.13 with the newest JAX
	@.venv313/bin/python -c 'import jax, sys; print("smoke set: Python", sys.version.split()[0], "and JAX", jax.__version__)'
	.venv313/bin/python -m pytest -n 2 --dist worksteal -m "smoke and not slow"
else
smoke:
	@echo "smoke set left out: no Python 3.13 was found"
endif

lint: .venv/.test  ## style, types and floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory -j 2 mypy pyright

mypy pyright: .venv/.test
	$(BIN)/$@

format: .venv/.test  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.test  ## every benchmark, each printing JSON
	@set -e; for file in benchmarks/bench_*.py; do echo "# $$file" >&2; PYTHONPATH=. $(BIN)/python "$$file"; done

figures: .venv/.test  ## every figure, table and number of README and docs, made again
	$(BIN)/python -m docs.explanation.make
	$(BIN)/python -m docs.figures.make
	$(BIN)/python -m docs.benchmarks.make
	$(BIN)/python -m docs.gallery.make
	$(BIN)/python -m docs.reference.make
	$(BIN)/python -m docs.reference.json_schemas
	$(BIN)/python -m pytest -q -n 2 tests/docs --docs-update
	$(BIN)/python -m docs.tutorial.make

docs: .venv/.docs  ## the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## remove the environments and all that was built
	rm -rf .venv .venv313 build dist site *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find autopar passes runtime tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/python:
	@if [ -z "$(PYTHON)" ]; then \
	  echo "autopar needs Python 3.11 or newer with venv and pip; none was found on PATH." >&2; \
	  echo "Install one, or say where it is: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; fi
	@echo "making .venv with $(PYTHON) (once; a minute or two)"
	@"$(PYTHON)" -m venv .venv

.venv313/bin/python:
	@echo "making .venv313 with $(PYTHON313) (once; a minute or two)"
	@"$(PYTHON313)" -m venv .venv313

.venv/.%: pyproject.toml | .venv/bin/python
	@$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

.venv313/.%: pyproject.toml | .venv313/bin/python
	@.venv313/bin/python -m pip install --quiet --upgrade jax jaxlib --editable '.[$*]'
	@touch $@
