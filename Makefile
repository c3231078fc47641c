# One or two lines each; what is needed is installed when .venv is missing or older than what defines it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Serving needs a tenth of what tests and linters need.
SERVE_STAMP := $(VENV)/.serves
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# The servers and workers that tests start import what is compiled already, also where Python is told to write none:
# a server starts in two thirds of the time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup serve wheel test test-slow test-failed lint type format proto bench bench-setup clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(SERVE_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing what conch needs to serve into $(VENV) ..."
	$(INSTALL) -e '.[demo]' && touch $@

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing what conch and its tests need into $(VENV); this takes a minute or two ..."
	$(INSTALL) -e '.[dev]' && touch $(SERVE_STAMP) $@

setup: $(STAMP)

serve: $(SERVE_STAMP)
	$(BIN)/conch demo

wheel: $(SERVE_STAMP)
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist .

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow'

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

test-failed: $(STAMP)
	$(BIN)/python -m pytest --last-failed --last-failed-no-failures none

lint: type
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/python scripts/generate_protocol.py --check

type: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

proto: $(STAMP)
	$(BIN)/python scripts/generate_protocol.py

bench-setup: $(STAMP)
	bash bench/setup_peers.sh

bench: bench-setup
	$(BIN)/python -m bench.run $(BENCH)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
