# Both main commands set everything up by themselves: make demo, make test. `make docs` builds the site.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_OPTIONS := --quiet --disable-pip-version-check

.PHONY: demo test docs dist abuse bench clean

demo: $(STAMP)
	$(BIN)/dpl demo

test: $(STAMP)
	$(BIN)/ruff check src tests benchmarks docs examples
	$(BIN)/ruff format --check src tests benchmarks docs examples
	$(BIN)/mypy
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Into site/; its pages open from disk and ask no other machine for anything. Strict: a broken link is an error.
docs: $(STAMP)
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Wheel and source archive, checked, and the wheel tried in an empty environment outside the checkout.
dist: $(STAMP)
	rm -rf dist build
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	trial=$$(mktemp -d) && trap 'rm -rf "$$trial"' EXIT && \
	$(PYTHON) -m venv "$$trial" && \
	"$$trial/bin/pip" install $(PIP_OPTIONS) -c constraints.txt torch numpy && \
	"$$trial/bin/pip" install $(PIP_OPTIONS) "$$(echo $(CURDIR)/dist/*.whl)[demo]" && \
	cd "$$trial" && bin/dpl --help && bin/python -m dpl list && bin/dpl demo

# In full; more than an hour on two cores. Stopped and started again, it goes on where it was.
abuse: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/abuse.py --out runs/abuse --jobs $$(nproc)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/serve_abuse.py
	DPL_SLOW_TESTS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/serve/test_serve_ray.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/conformance.py --failures 200 --threads 2000
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/serve_attacks.py
	DPL_FUZZ=5000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/serve/test_serve_fuzz.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fuzz.py # if atheris is installed

# Speed and memory of every method, and how they grow; some hours on two idle cores. Stopped and started again, it goes on.
bench: $(STAMP)
	mkdir -p runs/bench
	cd benchmarks && $(abspath $(BIN))/python -m speed --out ../runs/bench/speed.json
	$(BIN)/python benchmarks/growth.py --out runs/bench/growth.json --picture runs/bench/growth.png

# torch first and constrained: an unconstrained resolve would pull a CUDA build.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_OPTIONS) -c constraints.txt torch numpy setuptools
	$(BIN)/python -m pip install $(PIP_OPTIONS) -c constraints.txt --no-build-isolation -e '.[demo,bench,serve,docs,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .mypy_cache .pytest_cache .ruff_cache
