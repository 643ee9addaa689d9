# make demo and make test set everything up first; with everything in place that takes a second. PYTHON=python3.12 chooses
# the interpreter of a new .venv.
VENV_PYTHON := .venv/bin/python

.PHONY: help setup demo test parity lint format docs clean
.DEFAULT_GOAL := help

# the tests start a few hundred processes, which would all compile the library again
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo    train a policy in ManiSkill: imitation first, then reinforcement learning (3 to 5 minutes)"
	@echo "make test    run the tests"
	@echo "make parity  compare our policies with LeRobot's, in an environment of its own (several GB the first time)"
	@echo "make setup   only set up .venv and the simulators' system libraries"
	@echo "make lint    ruff, its formatter's check, and mypy"
	@echo "make format  let ruff format and fix what it can"
	@echo "make docs    build the documentation into docs/_build/html"
	@echo "make clean   remove caches and built documentation (not .venv, not .parity-venv, not runs/)"

setup:
	@PYTHON='$(PYTHON)' bash scripts/setup.sh

demo: setup
	$(VENV_PYTHON) examples/demo.py

test: setup
	@$(VENV_PYTHON) -S scripts/browser.py
	$(VENV_PYTHON) -m pytest

parity: setup
	@PARITY_PYTHON='$(PARITY_PYTHON)' bash scripts/parity.sh

lint: setup
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy

format: setup
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .

docs: setup
	$(VENV_PYTHON) -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:
	rm -rf docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis build
	find . \( -path ./.venv -o -path ./.parity-venv \) -prune -o -type d -name __pycache__ -exec rm -rf {} +
