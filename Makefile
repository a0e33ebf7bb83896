# Each target first makes .venv and installs requirements.txt there, when that is missing or out of date.
# The same as plain commands, for people without make: CONTRIBUTING.md.

PYTHON ?= python3
ARGS ?=

# The environment's commands (torchrun …) are on the PATH of what we run, as if it were activated.
RUN := PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python
READY := .venv/installed
NBVAL := --nbval --nbval-current-env --nbval-sanitize-with tests/nbval_sanitize.cfg \
	--nbval-cell-timeout 600 --timeout 900

.PHONY: help lab test train notebooks pages images lint type cover check bench clean unit nbval
.NOTPARALLEL:
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo 'ARGS="…" is handed on, as in: make lab ARGS=--no-browser'

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo; \
	    echo "gpipe_lite needs Python 3.11 or newer, and $(PYTHON) is not: name one with make PYTHON=python3.12"; \
	    exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { echo; \
	    echo "$(PYTHON) lacks its venv module: on Debian and Ubuntu, sudo apt install python3-venv"; \
	    exit 1; }
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

# The stamp is written last, so that a failed or interrupted installation is done again.
$(READY): .venv/bin/python requirements.txt pyproject.toml
	@rm -f $@
	.venv/bin/python -m pip install --disable-pip-version-check -r requirements.txt
	@touch $@

# The whole repository is served, so that links into gpipe_lite open; --allow-root is for containers.
lab: $(READY) ## open the book in JupyterLab, at chapter 00
	$(RUN) -m jupyterlab --allow-root --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(ARGS)

train: $(READY) ## train on a pipeline; ARGS=--help lists the options
	$(RUN) -m gpipe_lite.train $(ARGS)

test: unit nbval ## run all tests, and the notebooks against their committed outputs

unit: $(READY) ## run all tests but the notebooks
	-@$(RUN) tools/browser.py
	$(RUN) -m coverage erase
	$(RUN) -m coverage run -m pytest $(ARGS)

nbval: $(READY)
	$(if $(wildcard notebooks/*.ipynb),$(RUN) -m pytest $(NBVAL) notebooks,@echo "no notebooks yet")

cover: unit ## run the tests and require the coverage
	$(RUN) -m coverage combine --quiet
	$(RUN) -m coverage report

lint: $(READY) ## check style, formatting, notebooks and links
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) tools/notebooks.py lint

type: $(READY) ## check types
	$(RUN) -m mypy

check: lint type test cover ## all that CI checks

notebooks: $(READY) ## execute all notebooks in place
	$(RUN) tools/notebooks.py execute $(ARGS)

pages: $(READY) ## write all notebooks as web pages, which need no server
	$(RUN) tools/notebooks.py pages $(ARGS)

images: $(READY) ## draw the pictures again
	$(RUN) images/draw.py $(ARGS)

bench: $(READY) ## measure speed
	$(RUN) tests/benchmarks/speed.py $(ARGS)
	$(RUN) tests/benchmarks/processes.py
	$(RUN) tests/benchmarks/explore.py

clean: ## remove caches and reports; rm -rf .venv starts over
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* build *.egg-info notebooks/*.html \
	    notebooks/solutions/*.html
	find . -name .venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
