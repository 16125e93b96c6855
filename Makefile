# Works on a fresh machine with python3 (3.10 or newer), make and git; `make` alone lists the targets.

# The build of PyTorch, and the index that has it, if not pip's usual one.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PYTHON3 ?= python3
VENV ?= .venv
PYTHON := $(VENV)/bin/python
PYTEST_ARGS ?=
# More test processes than cores, because tests often wait for Slurm and trackers.
PROCESSES ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 8 ? cores + 1 : 8)))
PYTEST := $(PYTHON) -m pytest --numprocesses $(PROCESSES) --dist worksteal
# The PyTorch of test-torch: oldest, newest, or a version such as 2.9.1. The oldest allowed version and the
# newest tested one are in template/pyproject.toml.jinja.
TORCH_VERSION ?= newest
named = $(shell sed -nE 's/^ *(tested = \[)?"torch$(1)([0-9.]+)".*/\2/p' template/pyproject.toml.jinja)
torch-oldest = torch==$(call named,>=).0
torch-newest = torch<$(lastword $(call named,<))
# The tests that depend most on PyTorch.
TORCH_TESTS := tests/render/test_types.py $(addprefix tests/run/test_,$(addsuffix .py, \
	check_comm compiler data evaluate examples flops foreign_files hooks launch learner profile recipes \
	resume saving step_totals strategy torch_names torch_versions))
# The Slurm version of test-slurm, or all.
SLURM ?= 26.05
SLURM_VERSIONS := 23.11 24.11 25.11 26.05
ARGS ?=

export TORCH TORCH_INDEX PYTHON3 OTHER_PYTHON
# Without compiled files, Python compiles torch at every start: four seconds instead of two, for each rank.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo mutants test test-all test-nightly test-slurm test-torch torch-tests coverage lint docs benchmarks clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.* ## /\1: /p' Makefile

demo: ## make a project in .demo/ and train it on two CPU ranks
	@bash scripts/demo.sh

test: lint docs ## check a change in ten minutes: linters, links, renders of all variants, training, stops, updates
	$(PYTEST) -m 'not full and not slow' $(PYTEST_ARGS)

test-all: lint docs ## check all that a change must pass: the same, and Slurm (as root), trackers, containers
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

test-nightly: lint docs ## the same, and more launchers, strategies, signals and world sizes
	$(PYTEST) $(PYTEST_ARGS)

mutants: .venv/ready ## plant faults in copies of this repository, and show which ones the tests miss: 40 minutes; SHARE=10: a tenth
	$(PYTHON) tests/mutants.py --share $(or $(SHARE),1)

test-slurm: $(addprefix test-slurm-,$(if $(filter all,$(SLURM)),$(SLURM_VERSIONS),$(SLURM))) ## run the tests of the cluster with another Slurm: SLURM=23.11, 24.11, 25.11, 26.05 or all

test-torch: .venv/ready ## run the tests of training with another PyTorch (gigabytes): TORCH_VERSION=oldest, newest or such as 2.9.1
	$(MAKE) torch-tests VENV=.torch/$(TORCH_VERSION) OTHER_PYTHON=$(CURDIR)/$(PYTHON) \
		TORCH='$(or $(torch-$(TORCH_VERSION)),torch==$(TORCH_VERSION))'

test-gpu: $(VENV)/with-peers ## train on the GPUs of this machine, and measure it: at most ten minutes; writes gpu.json
	$(PYTHON) -m pytest tests/gpu --record gpu.json $(PYTEST_ARGS)
	$(PYTHON) -m benchmarks steps checkpoints accuracy --repeats 3 --name gpu

torch-tests: $(VENV)/ready
	$(PYTEST) $(TORCH_TESTS) -m 'not slow' $(PYTEST_ARGS)

test-slurm-%: .venv/ready
	scripts/with-slurm.sh $* $(PYTEST) tests/slurm -m 'not slow' $(PYTEST_ARGS)

coverage: export COVERAGE_FOLDER := $(CURDIR)/.coverage
coverage: .venv/ready ## run the tests, and list the rendered lines that no test runs
	rm -rf $(COVERAGE_FOLDER)
	mkdir $(COVERAGE_FOLDER)
	-COVERAGE_PROCESS_START=$(CURDIR)/tests/coverage/settings.ini BASH_ENV=$(CURDIR)/tests/coverage/trace.sh \
		$(PYTEST) -m 'not slow' $(PYTEST_ARGS)
	$(PYTHON) tests/coverage/report.py

lint: .venv/ready ## run the linters only
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) tests/rooms.py
	.venv/bin/shellcheck .ci/run scripts/*.sh
	$(VENV)/bin/codespell

docs: .docs/venv/ready ## build the site of all pages in .docs/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 .docs/venv/bin/python -m mkdocs build --strict
	@echo 'Open .docs/site/index.html in a browser.'

benchmarks: $(VENV)/with-peers ## compare the trainer with others; ARGS chooses what to measure
	$(PYTHON) -m benchmarks $(ARGS)

# torch comes first, so that other packages keep the chosen build. --no-compile saves a minute: Python
# compiles modules when it imports them.
$(VENV)/ready: pyproject.toml
	$(PYTHON3) -m venv $(VENV)
	$(PYTHON) -m pip install --upgrade 'pip>=25.1'
	$(PYTHON) -m pip install --no-compile $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') '$(TORCH)'
	$(PYTHON) -m pip install --no-compile --group test
	@touch $@

$(VENV)/with-peers: $(VENV)/ready
	$(PYTHON) -m pip install --group benchmark
	@touch $@

.docs/venv/ready: pyproject.toml
	$(PYTHON3) -m venv .docs/venv
	.docs/venv/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	.docs/venv/bin/python -m pip install --quiet --no-compile --group docs
	@touch $@

clean: ## remove the test environment, the demo and the site
	rm -rf .venv .torch .demo .docs
