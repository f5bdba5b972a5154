# Every target works on a fresh clone: make check, make test, make soak, make bench, make demo.
# PY chooses the interpreter, ARGS goes to the program that a target runs.

PY ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
DEMO_VENV := .venv-demo
SOURCES := $(shell find redis_stream_coord -type f -not -name '*.pyc')

.PHONY: help venv check test soak bench demo
.DELETE_ON_ERROR:

help:
	@echo "make venv | check | test | soak | bench | demo   [PY=python3] [ARGS=...]"

venv: $(VENV)/.stamp

$(VENV)/.stamp: pyproject.toml
	$(PY) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	touch $@

check: venv
	$(BIN)/ruff check redis_stream_coord tests examples
	$(BIN)/ruff format --check redis_stream_coord tests examples
	$(BIN)/mypy redis_stream_coord examples tests/typed_use.py
	$(BIN)/lint-imports

test: venv
	$(BIN)/python -m pytest $(ARGS)

# Five minutes of signals and restarts; ARGS="--seconds 60 --seed 7 --server valkey9".
soak: venv
	$(BIN)/python -m tests.chaos.soak $(ARGS)

bench: venv
	$(BIN)/python -m tests.benchmarks $(ARGS)

# As a user installs it, not in place: so the demo also shows that the package is whole. Hence the sources.
$(DEMO_VENV)/.stamp: pyproject.toml $(SOURCES)
	$(PY) -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/python -m pip install --quiet '.[demo]'
	touch $@

demo: $(DEMO_VENV)/.stamp
	$(DEMO_VENV)/bin/python examples/demo.py $(ARGS)
