# `make train` and `make test` do all of their own set-up; a second call reuses it.
PYTHON ?= python3
VENV ?= .venv
PEERS ?= .venv-peers
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help train test coverage mutants lint bench bench-peers docs clean

help:
	@echo "make train          train the default recipe: a small model learns to add (ARGS=\"--seed 1\" passes flags on)"
	@echo "make test           run the tests (ARGS=\"-k gdpo\" passes flags on)"
	@echo "make coverage       which lines of the core its tests run"
	@echo "make mutants        whether they notice one-operator changes of it (hours; ARGS=\"losses --sample 100\")"
	@echo "make lint           ruff and mypy --strict"
	@echo "make bench          speed of the core, side by side with plain torch versions"
	@echo "make bench-peers    the same against verl and TRL, installed into an environment of their own"
	@echo "make docs           algorithms, API reference and guides as a website in build/docs"
	@echo "make clean          remove the environment and what the tools left"

train: $(VENV)/.installed-train
	@$(BIN)/relax train $(ARGS)

test: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical $(ARGS)
	@echo "All tests passed. Next: make train"

# These two and nothing else need their tool; it is installed when they first run.
coverage: $(VENV)/.installed-dev
	@$(INSTALL) coverage
	@OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest tests/core property_tests && $(BIN)/coverage report

mutants: $(VENV)/.installed-dev
	@$(INSTALL) cosmic-ray
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.mutants $(or $(ARGS),numerics rewards advantages losses)

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

bench: $(VENV)/.installed-dev
	@$(BIN)/python -m benchmarks $(ARGS)

bench-peers: $(PEERS)/.installed
	@$(PEERS)/bin/python -m benchmarks $(ARGS)

# Of its own and without the constraints: verl asks for older versions of what training needs.
$(PEERS)/.installed: pyproject.toml
	@echo "Installing verl and TRL into $(PEERS) (several minutes, some 3 GB) ..."
	@$(PYTHON) -m venv $(PEERS)
	@$(PEERS)/bin/pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $@

docs: $(VENV)/.installed-docs
	@$(BIN)/python -m relax.documentation
# Not --quiet: warnings that are not logged do not count for --strict.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The documentation: file://$(CURDIR)/build/docs/index.html"
	@echo "With search: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs"

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11 or newer, or set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is too old: Python 3.11 or newer is needed (set PYTHON=...)"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-train: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Relax and what training needs into $(VENV) (one to three minutes) ..."
	@$(INSTALL) --editable '.[train]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Relax and what its tests need into $(VENV) (one to three minutes) ..."
	@$(INSTALL) --editable '.[train,dev]'
	@touch $@ $(VENV)/.installed-train

$(VENV)/.installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Relax and what its documentation needs into $(VENV) (one to three minutes) ..."
	@$(INSTALL) --editable '.[train,docs]'
	@touch $@ $(VENV)/.installed-train

clean:
	rm -rf $(VENV) $(PEERS) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
