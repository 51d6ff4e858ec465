# Two commands for a fresh machine (python3 >= 3.10 with venv, and make): `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench soak clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)  ## Train the digits example on two local instances, then show its state.
	CLOUDTRAIN_HOME=$(CURDIR)/.demo $(BIN)/cloudtrain submit -f examples/digits/cloudtrain.yaml --instances 2
	CLOUDTRAIN_HOME=$(CURDIR)/.demo $(BIN)/cloudtrain status last

test: $(READY) lint  ## Everything: lint, types, unit tests in parallel, then the real distributed runs.
	$(BIN)/pytest -n 2 -m "not slow"
	$(BIN)/pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/run.py

soak: $(READY)
	$(BIN)/python benchmarks/soak.py

clean:
	rm -rf $(VENV) .demo build dist *.egg-info
