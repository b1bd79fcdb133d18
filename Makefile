PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint proto venv clean

# Installs once per change of pyproject.toml.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

venv: $(VENV)/.installed

demo: venv
	$(BIN)/kvrelay demo

test: venv lint
	$(BIN)/python -m pytest

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

proto: venv
	$(BIN)/python scripts/generate_stubs.py

clean:
	rm -rf $(VENV) build dist *.egg-info
