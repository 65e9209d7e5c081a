# make demo   install into .venv, train three methods on the embedded drawings: table, CSV files, plot
# make test   install and run the tests
# make oldest-flower   run the tests that touch Flower on the oldest version of the range
# make trials   run all long trials in order (hours), resumable, into one page
# make docs   build the documentation site into docs/_build in one to two minutes; every warning is an error
# They do only what is missing: called again, they start at once.

PYTHON ?= python3
BIN := .venv/bin
OUTPUT ?= outputs

# What touches Flower beside its public interface, for the oldest version of the range; `make test` has the newest.
FLOWER_TESTS := tests/flower tests/deployment tests/deploy tests/strategies/test_flower_parts.py

.PHONY: install demo test oldest-flower trials lint docs

install: .venv/installed

.venv/installed: pyproject.toml
	@echo "installing into .venv: one to five minutes without further output"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check "uv<0.14"
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -e ".[dev]"
	@touch $@

demo: install
	$(BIN)/fedsim sweep drawings --methods fedavg,gperxan,deepall --targets openmoji_black,twemoji --seeds 0 --output $(OUTPUT)
	$(BIN)/fedsim compare $(OUTPUT)/drawings --baseline fedavg
	$(BIN)/fedsim plot $(OUTPUT)/drawings
	@echo "done: six runs with their tables and pictures are in $(OUTPUT)/drawings"
	@echo "next: $(BIN)/fedsim report $(OUTPUT)/drawings; $(BIN)/fedsim methods"

test: install
	$(BIN)/pytest -n 2 --dist worksteal

oldest-flower: install
	$(BIN)/uv pip install --quiet --python $(BIN)/python --target .venv/oldest-flower --no-deps "flwr==1.41.*"
	PYTHONPATH=.venv/oldest-flower $(BIN)/pytest -n 2 $(FLOWER_TESTS)

trials: oldest-flower
	$(BIN)/python tests/trials.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/mypy

docs: install
	@echo "the site is built in one to two minutes: docs/_build/index.html"
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build
