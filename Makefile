# Every target installs what it needs: uv (with pip into .uv if the machine has none), then the environment in .venv.
.PHONY: help setup demo test lint format docs release-check clean

UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
RUN := $(UV) run --no-sync
# Without bytecode on disk every process compiles torch and all else that it imports again, for seconds.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo   train on digit bags and write demo/report.html"
	@echo "make test   run the tests, one worker per core"
	@echo "make lint   run the linters and the type checker"
	@echo "make format reformat the code"
	@echo "make docs   build the documentation into site/"
	@echo "make release-check  build the release and try it in a new environment"

.uv/bin/uv:
	python3 -m pip install --quiet --disable-pip-version-check --target .uv uv

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt | $(if $(filter .uv/bin/uv,$(UV)),.uv/bin/uv)
	$(UV) venv --quiet --allow-existing .venv
	$(UV) pip install --quiet --constraint constraints.txt --editable . --group dev --group docs
	@$(RUN) python tools/fetch_openseadragon.py
	@touch $@

demo: setup
	$(RUN) carmil demo --out demo

test: setup
	$(RUN) pytest -n auto --dist loadscope

lint: setup
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: setup
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

docs: setup
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict --quiet
	@$(RUN) python tools/check_site.py site

release-check: setup
	$(RUN) python tools/check_release.py $(UV)

clean:
	rm -rf .venv .uv .mypy_cache .pytest_cache .ruff_cache demo site
