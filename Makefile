# One or two lines each; what is needed is installed when .venv is missing or older than what defines it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Serving needs a tenth of what tests and linters need.
SERVE_STAMP := $(VENV)/.serves
# Three files at a time on two cores: tests wait for half of their time.
PYTEST = $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --times $(RECORD)
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# The servers and workers that tests start import what is compiled already, also where Python is told to write none:
# a server starts in two thirds of the time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup serve wheel wheels compiled test-compiled release image test test-all test-rest test-environments test-processes test-release \
	test-pythons test-installs test-airflow test-mlflow test-failed faults lint ratchet type style structure generated format proto \
	settings docs bench bench-setup clean

# What is there was made with another Python than the one that is asked for: it is not used in its place.
ifneq ($(origin PYTHON),file)
ifneq ($(wildcard $(BIN)/python),)
version = $(shell $(1) -c 'import platform; print(platform.python_version())')
ifneq ($(call version,$(PYTHON)),$(call version,$(BIN)/python))
ifneq ($(MAKECMDGOALS),clean)
$(error $(VENV) is of Python $(call version,$(BIN)/python), $(PYTHON) is $(or $(call version,$(PYTHON)),none that runs): remove $(VENV) first)
endif
endif
endif
endif

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(SERVE_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing what conch needs to serve into $(VENV) (300 MB) ..."
	$(INSTALL) -e '.[demo]' && touch $@

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing what conch and its tests need into $(VENV) (2.4 GB); this takes minutes ..."
	$(INSTALL) -e '.[dev]' && touch $(SERVE_STAMP) $@

# The host of compiled backends, where there is a C compiler; its tests are skipped without.
NATIVE_STAMP := $(VENV)/.native
$(NATIVE_STAMP): $(STAMP) $(shell find services/conch_native -name '*.[ch]' -o -name '*.py' -o -name '*.toml')
	if command -v "$${CC:-cc}" >/dev/null; then $(INSTALL) --no-deps --force-reinstall ./services/conch_native; fi && touch $@

setup: $(STAMP) $(NATIVE_STAMP)

serve: $(SERVE_STAMP)
	$(BIN)/conch demo

# Of the server, the host of compiled backends (with the machine's C compiler, else PyPI's), and the plug-ins.
PROJECTS := . ./services/conch_native ./services/conch_mlflow ./services/airflow_provider_conch
wheel: | $(BIN)/python
	$(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist $(PROJECTS)

# Besides it, for each Python that is here or that PYTHONS names, the wheel that mypyc has compiled; in minutes.
wheels: | $(BIN)/python
	$(BIN)/python -m scripts.build_wheels $(PYTHONS)

# That wheel of this Python in an environment of its own, with the packages of .venv.
COMPILED := build/compiled
$(COMPILED)/.ready: $(STAMP) scripts/compile_hook.py scripts/build_wheels.py $(shell find services control -name '*.py')
	$(BIN)/python -m scripts.build_wheels --environment $(COMPILED) && touch $@

compiled: $(COMPILED)/.ready

release: | $(BIN)/python
	$(BIN)/python scripts/build_release.py $(PROJECTS)

# make image TAGS="slim onnx"; the tags and what is in them: deploy/image/docker-bake.hcl
TAGS ?= slim onnx
image:
	@docker buildx version >/dev/null 2>&1 || { echo "make image needs docker with buildx, which is not here"; exit 1; }
	docker buildx bake --file deploy/image/docker-bake.hcl $(BAKE) $(TAGS)

test: $(STAMP) $(NATIVE_STAMP)
	$(PYTEST) -m 'not slow and not process'

# On the compiled build; TESTS=tests/conch/unit/ipc names some.
test-compiled: export CONCH_TEST_BUILD = compiled
test-compiled: $(COMPILED)/.ready $(NATIVE_STAMP)
	$(subst $(BIN)/,$(COMPILED)/bin/,$(PYTEST)) -m 'not slow and not process' $(TESTS)

test-all: export HYPOTHESIS_PROFILE ?= ci
test-all: test test-rest

# What `test` leaves out; `make -k` goes on where a part fails.
test-rest: test-environments test-processes

test-environments: $(STAMP)
	-PYTHON=$(BIN)/python bash tests/setup_tensorflow.sh
	-PYTHON=$(BIN)/python bash tests/setup_model_analyzer.sh
	-bash tests/setup_clients.sh
	-PYTHON=$(BIN)/python bash tests/setup_ray.sh
	-PYTHON=$(BIN)/python bash tests/setup_llm_clients.sh
	-bash tests/setup_deploy.sh
	-PYTHON=$(BIN)/python bash tests/setup_proxies.sh
	-PYTHON=$(BIN)/python bash tests/setup_image.sh
	-bash tests/setup_browser.sh

test-processes: $(STAMP) $(NATIVE_STAMP)
	$(PYTEST) -m 'slow or process'

# By hand, once for each issue: what runs long and rarely fails.
test-release: test-pythons test-installs test-airflow test-mlflow

# The quick tests on each Python that is here, or on those that PYTHONS names; in minutes for each.
test-pythons:
	$(PYTHON) scripts/test_pythons.py $(PYTHONS)

# Apart from the others, as their environments take minutes to make. Where they are, `test-all` runs these tests too.
test-airflow: $(STAMP)
	PYTHON=$(BIN)/python bash tests/setup_airflow.sh
	$(BIN)/python -m pytest -m airflow tests/airflow_provider_conch

test-mlflow: $(STAMP)
	PYTHON=$(BIN)/python bash tests/setup_mlflow.sh
	$(BIN)/python -m pytest -m mlflow tests/conch_mlflow

# The install lines of the docs, each in a fresh environment; takes minutes and what pip downloads.
test-installs: wheel
	$(BIN)/python scripts/try_installs.py

# Exit status 5: nothing had failed.
FAILED = $(BIN)/python -m pytest --last-failed --last-failed-no-failures none $(RECORD)
test-failed: export HYPOTHESIS_PROFILE ?= ci
test-failed: $(STAMP) $(NATIVE_STAMP)
	$(FAILED) || test $$? = 5

faults: $(STAMP)
	$(BIN)/python scripts/planted_faults.py

# Its parts side by side on two cores; the longest begins first.
lint: $(STAMP)
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target type structure style generated

type: $(STAMP)
	$(BIN)/mypy

structure: $(STAMP)
	$(BIN)/python scripts/check_structure.py

style: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

generated: $(STAMP)
	$(BIN)/python scripts/generate_protocol.py --check && $(BIN)/python scripts/generate_settings.py --check

ratchet: $(STAMP)
	$(BIN)/python -m bench.ratchet

format: $(STAMP)
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

proto: $(STAMP)
	$(BIN)/python scripts/generate_protocol.py

settings: $(STAMP)
	$(BIN)/python scripts/generate_settings.py

docs: $(STAMP)
	$(BIN)/mkdocs build --strict --site-dir build/site

bench-setup: $(STAMP)
	bash bench/setup_peers.sh

bench: bench-setup
	$(BIN)/python -m bench.run $(BENCH)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
