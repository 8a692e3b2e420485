# Everything a fresh machine needs is installed into .venv by the first target that is run.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch first and by version: a bare `torch` would bring gigabytes of CUDA along where a CPU build will do.
TORCH := torch==2.13.0
# Python compiles what is imported; of torch and transformers alone, that is a small part of thousands of files.
INSTALL := $(BIN)/pip install --quiet --no-compile

.PHONY: demo test quick lint format types bench compat profile-truth zoo fuzz soak pictures pages chromium clean

demo: $(VENV)/ready  ## log a model; print, index, table and draw it
	$(BIN)/python examples/alexnet.py

test:  ## lint, types and tests
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target $(VENV)/tested chromium
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint types
	$(BIN)/python -m pytest -m "not soak" --numprocesses 2 --dist worksteal

# The folders that every change touches; no browser, no notebook, no zoo.
QUICK := tests/test_api.py tests/test_layout.py tests/recording tests/capture tests/graph tests/history tests/validate tests/export

quick: $(VENV)/tested lint  ## the essential tests, in under a minute
	$(BIN)/python -m pytest -m "not slow and not soak" --numprocesses 2 --dist worksteal $(QUICK)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/ready
	$(BIN)/mypy

bench: $(VENV)/ready  ## the table of costs, against the plain forward pass and against peers
	$(BIN)/python benchmarks/run.py $(ARGS)
	$(BIN)/python -m benchmarks.interventions

compat: $(VENV)/ready chromium  ## the essential tests on the oldest, the newest and other releases of torch
	$(BIN)/python -m benchmarks.compat $(QUICK) $(ARGS)

profile-truth: $(VENV)/tested  ## the times of a profile against hooks made by hand, on a quiet machine; ARGS=--cpu on a busy one
	$(BIN)/python -m benchmarks.profile_truth $(ARGS)

zoo: $(VENV)/tested  ## log and validate real architectures; FILTER=resnet for some of them
	$(BIN)/python -m benchmarks.zoo $(FILTER) $(ARGS)

fuzz: $(VENV)/tested  ## ten minutes of random programs
	$(BIN)/python tests/fuzz/run.py --minutes 10 $(ARGS)

soak: $(VENV)/tested chromium  ## the tests that repeat others many times; threads, interrupts, memory after a hundred models
	$(BIN)/python -m pytest -m soak --numprocesses 2 --dist worksteal
	$(BIN)/python -m benchmarks.soak $(ARGS)

pictures: $(VENV)/tested chromium  ## make all pictures in images/ anew
	$(BIN)/python examples/draw_gallery.py
	$(BIN)/python examples/draw_recipes.py
	$(BIN)/python -m tests.page.pictures

pages: $(VENV)/tested chromium  ## open the pages of fifteen models in Chromium; NAMES="t5 gat" for some of them
	$(BIN)/python -m benchmarks.pages $(NAMES)

# The page is tested in a real browser.
chromium:
	@command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq chromium >/dev/null)

clean:
	rm -rf $(VENV) .venvs build *.egg-info

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --upgrade pip
	$(INSTALL) $(TORCH)
	$(INSTALL) --editable '.[draw,networkx,dev]'
	touch $@

# The tests also log models of other people's, and send runs to other people's programs.
$(VENV)/tested: $(VENV)/ready
	$(INSTALL) --editable '.[zoo,tensorboard,wandb,trackio,mlflow,lightning,transformers,video,tsne,features]'
	touch $@
