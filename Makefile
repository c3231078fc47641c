# One or two lines each; `make setup` runs by itself when .venv is missing or older than what defines it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

# The servers and workers that tests start import what is compiled already, also where Python is told to write none:
# a server starts in two thirds of the time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup serve test test-slow test-failed lint type format proto bench bench-setup clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' && touch $(STAMP)

setup: $(STAMP)

serve: $(STAMP)
	$(BIN)/conch serve --model-repository=examples/models/basic --model-repository=examples/models/python

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
