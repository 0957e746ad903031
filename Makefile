# Everything sets itself up: uv (fetched with pip into .uv when the machine has none), then the environment in .venv.
.PHONY: help setup demo test lint format clean

UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
RUN := $(UV) run --no-sync

help:
	@echo "make demo   train on digit bags and write demo/report.html"
	@echo "make test   run the tests"
	@echo "make lint   run the linters and the type checker"
	@echo "make format rewrite the code as the linter wants it"

.uv/bin/uv:
	python3 -m pip install --quiet --disable-pip-version-check --target .uv uv

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt | $(if $(filter .uv/bin/uv,$(UV)),.uv/bin/uv)
	$(UV) venv --quiet --allow-existing .venv
	$(UV) pip install --quiet --constraint constraints.txt --editable . --group dev
	@$(RUN) python tools/fetch_openseadragon.py
	@touch $@

demo: setup
	$(RUN) carmil demo --out demo

test: setup
	$(RUN) pytest

lint: setup
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: setup
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

clean:
	rm -rf .venv .uv .mypy_cache .pytest_cache .ruff_cache demo
