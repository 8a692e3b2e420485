# Everything a fresh machine needs is installed into .venv by the first target that is run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch first and by version: a bare `torch` would bring gigabytes of CUDA along where a CPU build will do.
TORCH := torch==2.13.0

.PHONY: demo test lint format types bench clean

demo: $(VENV)/ready  ## log a model; print, index and table it
	$(BIN)/python examples/alexnet.py

test: $(VENV)/ready lint types  ## lint, types and tests
	$(BIN)/python -m pytest

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/ready
	$(BIN)/mypy

bench: $(VENV)/ready  ## the table of costs, against the plain forward pass and against peers
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) .venvs build *.egg-info

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet --editable '.[draw,networkx,dev]'
	touch $@
