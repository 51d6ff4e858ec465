# Two commands for a fresh machine (python3 >= 3.10 with venv, and make): `make demo` and `make test`.
# The system's Python where it can make a venv: distributions build theirs with profiles, which saves a fifth of the time.
PYTHON ?= $(shell /usr/bin/python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo /usr/bin/python3 || echo python3)
VENV ?= .venv
BIN := $(VENV)/bin
BENCH_VENV ?= .venv-bench
SDK_VENV ?= .venv-sdk
DOCS_VENV ?= .venv-docs
READY := $(VENV)/.ready

# Without compiled files each of some thousand processes compiles its modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test session lint changed docs parity bench bench-trainer soak clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)  ## Train the digits example on two local instances, then show its state.
	CLOUDTRAIN_HOME=$(CURDIR)/.demo $(BIN)/cloudtrain submit -f examples/digits/cloudtrain.yaml --instances 2
	CLOUDTRAIN_HOME=$(CURDIR)/.demo $(BIN)/cloudtrain status last

test: $(READY)  ## Everything: lint and types beside all tests.
	$(MAKE) --no-print-directory -j 2 lint session

session: $(READY)  ## All tests in one session, slow tests first; prints the ten slowest.
	$(BIN)/pytest -n 6 --dist worksteal --durations 10 -m "not soak"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/launcher/pipeline.py tests/launcher/typed_calls.py

changed: $(READY)  ## The soak tests of the files that changed; CI runs them after `make test`.
	$(BIN)/python tools/soak_of_changes.py

$(DOCS_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

docs: $(DOCS_VENV)/.ready  ## The documentation as a site in build/site; a warning is an error.
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

$(SDK_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SDK_VENV)
	$(SDK_VENV)/bin/pip install --quiet -c constraints.txt -e '.[sagemaker,sagemaker-sdk]' hypothesis 'pytest>=8' pytest-timeout
	$(SDK_VENV)/bin/pip install --quiet --no-deps sagemaker-training==5.1.4 six
	touch $@

parity: $(SDK_VENV)/.ready  ## Our SageMaker request against what SageMaker's own SDK sends; a gigabyte to install.
	$(SDK_VENV)/bin/pytest tests/sdk tests/entrypoints/test_toolkit.py

bench: $(READY)
	$(BIN)/python benchmarks/run.py

$(BENCH_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/pip install --quiet -c constraints.txt -e '.[local,bench]'
	touch $@

bench-trainer: $(BENCH_VENV)/.ready  ## The trainer against a bare loop, Lightning, Accelerate and DCP; BENCH="--only steps" and so on.
	cd benchmarks && $(abspath $(BENCH_VENV))/bin/python -m trainer.run $(BENCH)

soak: $(READY)  ## The benchmarks' counts, larger, the tests of the stand-ins, and tests that repeat `make test` on other settings.
	$(BIN)/pytest -n 2 -m soak
	$(BIN)/python benchmarks/soak.py

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(SDK_VENV) $(DOCS_VENV) .demo build dist *.egg-info
