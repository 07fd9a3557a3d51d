# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: demo test lint types clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: lint types $(DEV_STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(DEV_STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(DEV_STAMP)
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(DEV_STAMP): $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(STAMP)

# Those the server is tested with; SERAI_CLIENTS_PYTHON=.venv-clients/bin/python tells the tests.
.venv-clients/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check -e '.[clients]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-clients build dist .demo *.egg-info
