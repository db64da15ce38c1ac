.DEFAULT_GOAL := help
.PHONY: help install demo quick test test-all soak names lint docs publish-docs bench clean

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
BIN := .venv/bin
BENCH := .venv-bench/bin

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

# torch goes in first and pinned: anything else that asks for it would fetch the build with CUDA.
.venv/.installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch --constraint $(CONSTRAINTS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]' --constraint $(CONSTRAINTS)
	touch $@

install: .venv/.installed  ## create .venv with kdpipes and what its tests need

demo: install  ## run the main job on the shipped photos
	$(BIN)/python -m kdpipes demo

quick: install  ## run the tests that start no processes: half a minute
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not full"

test: install  ## run these and the tests with worker processes and threads: six minutes
	$(BIN)/python -m pytest -q -n 2 -m "not full"

test-all: test  ## run all tests, also those of servers, notebooks, trainers, documentation and benchmarks
	$(BIN)/python -m pytest -q -n 2 -m full

soak: install  ## disturb random chains and compare each batch: ten minutes, or MINUTES=60; SEED= repeats a run
	$(BIN)/python tools/soak.py --minutes $(or $(MINUTES),10) $(if $(SEED),--seed $(SEED))

names: install  ## write what follows from the table of names: typing stubs, and the README's table of pipes
	$(BIN)/python tools/names.py

lint: install  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.venv/.docs: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]' --constraint $(CONSTRAINTS)
	touch $@

docs: .venv/.docs  ## build the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'Built: site/index.html. To search it, run `python -m http.server --directory site`.'

publish-docs: .venv/.docs  ## commit the documentation of VERSION= to the branch gh-pages; PUSH=--push pushes it
	$(BIN)/mike deploy $(PUSH) --update-aliases $(or $(VERSION),dev) $(ALIAS)

.venv-bench/.installed: pyproject.toml $(CONSTRAINTS) benchmarks/peers.txt benchmarks/install_peers.py
	test -x $(BENCH)/python || $(PYTHON) -m venv .venv-bench
	$(BENCH)/python -m pip install --quiet --disable-pip-version-check torch --constraint $(CONSTRAINTS)
	$(BENCH)/python -m pip install --quiet --disable-pip-version-check --editable '.[fast]' matplotlib \
		scikit-image scikit-learn --constraint $(CONSTRAINTS)
	$(BENCH)/python benchmarks/install_peers.py
	touch $@

bench: .venv-bench/.installed  ## compare the throughput with other loaders; ARGS="--photos DIR" and more
	$(BENCH)/python benchmarks/bench_throughput.py $(ARGS)

clean:  ## remove what the targets above made
	rm -rf .venv .venv-bench benchmarks/.corpus kdpipes-demo site
