# make demo   install into .venv and run the main job on the embedded data: table, CSV files, plot
# make test   install and run the tests
# make docs   build the documentation site into docs/_build; every warning is an error
# They do only what is missing: called again, they start at once.

PYTHON ?= python3
BIN := .venv/bin
OUTPUT ?= outputs

.PHONY: install demo test lint docs

install: .venv/installed

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check "uv<0.13"
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -e ".[dev]"
	@touch $@

demo: install
	$(BIN)/fedsim sweep digits --methods fedavg,fedsb,gperxan,deepall --targets rot0,rot45,rot75 --seeds 0 --output $(OUTPUT)
	$(BIN)/fedsim compare $(OUTPUT)/digits --baseline fedavg
	$(BIN)/fedsim plot $(OUTPUT)/digits

test: install
	$(BIN)/pytest -n 2 --dist worksteal

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

docs: install
	$(BIN)/sphinx-build -W --keep-going -q -b html docs docs/_build
