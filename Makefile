# Two commands are all a newcomer needs: `make demo` and `make test`. Each installs what it needs, once.
# A fresh machine needs Python 3.10 to 3.13 and make.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
export DAGSTER_HOME := $(CURDIR)
export HF_HUB_OFFLINE ?= 1

.PHONY: help demo ui test lint format clean
.DEFAULT_GOAL := help

help: ## Show the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-8s %s\n", $$1, $$2}'

# Installed from constraints.txt, so that everybody runs the same versions. Re-made only when a pin changes. The mark
# `installed` is away while pip works: an install that was killed may look whole to pip, so it is made afresh.
.venv/installed: pyproject.toml constraints.txt
	@echo "Installing into .venv (once; a few minutes)"
	@test -n "$(PYTHON)" || { echo "No Python 3.10 to 3.13 found; name one: make $@ PYTHON=/path/to/python"; exit 1; }
	@test -e $@ || test ! -e .venv || { echo "The install in .venv was not finished: starting afresh"; rm -rf .venv; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@test ! -e $@ || mv $@ $@.before
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' \
		|| { test ! -e $@.before || mv $@.before $@; exit 1; }
	@rm -f $@.before
	@touch $@

demo: .venv/installed ## Run the main job on the bundled documents: text in, trained model and provenance out
	@$(BIN)/pretrain demo

ui: .venv/installed ## Dagster UI on the same instance, at http://127.0.0.1:3000
	@$(BIN)/dagster dev -h 127.0.0.1 -p $(or $(PORT),3000) -w workspace.yaml

test: .venv/installed ## Run the tests, a module or class per worker, the long ones first (ARGS="-k name" for some)
	@$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder $(ARGS)

lint: .venv/installed ## ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: .venv/installed ## Let ruff rewrite what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean: ## Remove the demo's table, runs and Dagster instance; keep .venv
	rm -rf .pretrain .dagster storage history schedules logs .logs_queue .telemetry .nux
