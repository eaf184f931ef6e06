# Two commands set everything up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOWEST := .venv-lowest
COMPAT := .venv-compat
DLIO := .venv-dlio
PEERS := .venv-peers
INPUTS := pyproject.toml constraints.txt
# three processes for two cores: many tests mostly wait
TESTS := -n 3 --dist worksteal
# Tests start hundreds of processes on two cores: modules stay compiled, and threads of
# torch that wait do not spin.
unexport PYTHONDONTWRITEBYTECODE
test test-all fuzz lowest compat: export OMP_WAIT_POLICY := passive

.PHONY: demo test test-all portable compat check lint mypy names platforms pyright imports fuzz lowest package pythons bench dlio gpu docs docs-serve format clean

demo: $(VENV)/.dev
	$(BIN)/python examples/train_digits.py

# what a contributor waits for: the slow tests run in `make test-all`
test: check
	$(BIN)/pytest $(TESTS) -m "not slow and not fuzz"

test-all: check
	$(BIN)/pytest $(TESTS) -m "not fuzz"
	$(MAKE) portable

# tests of workers once more, with those of other platforms, started by forks
portable: $(VENV)/.dev
	PYTHONPATH=tests $(BIN)/pytest $(TESTS) -p portable_workers -m "not slow and not fuzz" \
		$(addprefix tests/,faults laws loader workers)

# two at a time, for two cores
check: $(VENV)/.dev
	$(MAKE) --jobs 2 --output-sync mypy pyright lint imports names platforms

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell src tests examples benchmarks tools docs *.md

mypy: $(VENV)/.dev
	$(BIN)/mypy

# names that need a second reading, and words to avoid
names: $(VENV)/.dev
	$(BIN)/python tools/names.py
	$(BIN)/python tests/docs/words.py

# the types as they are on macOS and Windows
platforms: $(VENV)/.dev
	$(BIN)/python tools/platforms.py

pyright: $(VENV)/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

imports: $(VENV)/.dev
	$(BIN)/lint-imports

# slow combinations of what the others hold, and laws with ten times as many examples
fuzz: $(VENV)/.dev
	$(BIN)/pytest $(TESTS) -m "fuzz or law" --hypothesis-profile fuzz \
		-o faulthandler_timeout=900

# the same tests, but the slow ones, with the lowest versions that are allowed
lowest: $(LOWEST)/.dev
	$(LOWEST)/bin/pytest $(TESTS) -m "not slow and not fuzz"

# real packages beside torch's loader, in an environment of their own
compat: $(COMPAT)/.ready
	$(COMPAT)/bin/pytest tests/compat --confcutdir=tests/compat -W ignore \
		-o faulthandler_timeout=600 -p no:cacheprovider

# builds sdist and wheel in a temporary environment, and uses them
package: $(VENV)/.dev
	$(BIN)/python tools/package.py

# quick tests on each version of Python that is installed
pythons: $(VENV)/.dev
	$(BIN)/nox

# some 2.5 hours; `make bench OPTIONS=--quick` sees in less than an hour that all of it works
bench: $(VENV)/.bench $(PEERS)/.ready $(DLIO)/.ready
	AIOLOADER_PEERS=$(CURDIR)/$(PEERS)/bin/python AIOLOADER_DLIO=$(CURDIR)/$(DLIO)/bin/python \
		$(BIN)/python benchmarks/run.py $(OPTIONS)

# of `make bench`, DLIO alone; `make dlio DLIO_ARGS=--quick` is small
dlio: $(DLIO)/.ready
	$(DLIO)/bin/python benchmarks/dlio/run.py $(DLIO_ARGS)

# on a machine with a GPU: builds apart, runs tools/check_gpu.py
gpu:
	benchmarks/gpu.sh

# the documentation, into site/; then `pytest tests/docs/test_site.py` walks it
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"

# torch first and alone: a later range is then met by the pinned build
$(VENV)/.dev: $(BIN)/python $(INPUTS)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[objects,arrow,sql,zstd,json]" --group dev
	touch $@

$(LOWEST)/.dev: tools/lowest.py $(INPUTS)
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(PYTHON) tools/lowest.py > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install --quiet -c $(LOWEST)/constraints.txt torch
	$(LOWEST)/bin/python -m pip install --quiet -c $(LOWEST)/constraints.txt -e ".[objects,arrow,sql,zstd,json]" --group test --group examples
	touch $@

$(COMPAT)/.ready: $(INPUTS)
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(COMPAT)/bin/python -m pip install --quiet -c constraints.txt torch
	$(COMPAT)/bin/python -m pip install --quiet -c constraints.txt -e . --group compat
	touch $@

# of what DLIO asks for, TensorFlow, DALI and torchvision are not used here
$(DLIO)/.ready: $(INPUTS)
	$(PYTHON) -m venv $(DLIO)
	$(DLIO)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(DLIO)/bin/python -m pip install --quiet -c constraints.txt torch
	$(DLIO)/bin/python -m pip install --quiet -c constraints.txt -e . --group dlio
	$(DLIO)/bin/python -m pip install --quiet --no-deps "dlio-benchmark==2.0.0"
	touch $@

# MosaicML Streaming pins an older numpy and a torchvision for another torch
$(PEERS)/.ready: $(INPUTS)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt torch
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt -e . --group peers
	$(PEERS)/bin/python -m pip install --quiet -c constraints.txt --no-deps mosaicml-streaming
	touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet -c constraints.txt --group bench
	touch $@

$(VENV)/.docs: $(BIN)/python $(INPUTS)
	$(BIN)/python -m pip install --quiet -c constraints.txt --group docs
	touch $@

clean:
	rm -rf site $(VENV) $(LOWEST) $(COMPAT) $(DLIO) $(PEERS) .mypy_cache .ruff_cache .pytest_cache .hypothesis
