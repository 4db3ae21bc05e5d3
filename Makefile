# Every target sets up .venv from nothing and is quick when it is there already.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test full lint docs package format setup clean

demo: setup ## race three ways to train a GPT on two links, digits beside it; demo/report.html
	$(BIN)/gossamer demo --out demo

# Files in the order of their names: by their number of tests, long ones would come last.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

full: setup ## what is too long for make test: whole tables, and benchmarks of several processes
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 -m full

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/codespell

docs: setup ## build/site/index.html; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

package: setup ## build the wheel, and use it in an environment that has nothing else
	.ci/package

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Gossamer needs Python 3.11 or newer, got $$($(PYTHON) --version); run make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[accelerate,bench,dev,docs,lightning,tensorboard,transformers]'
	@touch $@

clean:
	rm -rf $(VENV) demo dist build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
