# Everything that a person or a machine does with this checkout. Each target sets up what it needs.
#
# TORCHMIG_PYTHON         a Python with torch in it; its torch is used instead of a fresh one
# TORCHMIG_CRIU           a criu of 4.1 or newer, used instead of a private one
# TORCHMIG_DEBIAN_MIRROR  where the private criu comes from; else this machine's apt sources say
# REQUIREMENTS            requirements.txt leaves out the tools for checks and tests
# DEBUG=1                 build the extension without optimisation

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup criu demo test check check-model soak-cut fix bench clean
# Set-up steps write into one environment and must not run side by side.
.NOTPARALLEL:

SHELL := /bin/sh
PYTHON := $(or $(TORCHMIG_PYTHON),python3)
BIN := $(CURDIR)/.venv/bin
STAMPS := .stamps
IDENTITY := import sys; print(sys.base_prefix, sys.version)
# Wheels lying in .whl are installed instead of asking an index, for machines without one.
PIP := $(BIN)/python -m pip --disable-pip-version-check -q
PIP_INSTALL := $(PIP) install $(if $(wildcard .whl),--no-index --find-links .whl)
SOURCES := setup.py pyproject.toml $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h)
CXX_FILES = $(wildcard csrc/*.cpp csrc/*.h csrc/*/*.cpp csrc/*/*.h)
TESTS ?= tests
REQUIREMENTS ?= requirements-dev.txt
JOBS ?= 2

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMPS)/build criu ## make .venv with torch, build the extension, find or fetch CRIU

demo: setup ## train unbroken, then suspended and restored twice, and compare
	@$(BIN)/python examples/demo.py

test: setup ## run the tests (TESTS=path to choose, JOBS=n side by side)
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(TESTS)

check: $(STAMPS)/build ## look for faults without writing anything
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/python tools/check_layers.py
	$(BIN)/torchmig config markdown | diff -u docs/options.md -

check-model: $(STAMPS)/packages ## check the model of the cut in every interleaving (installs spin)
	@command -v spin > /dev/null || { apt-get -qq update && apt-get install -y -qq spin; } > /dev/null
	@$(BIN)/python tests/cut/model/check.py

soak-cut: $(STAMPS)/build ## run a million random jobs under the planner of the cut
	@cd tests/cut && $(BIN)/python -m cutsim.soak --programs 1000000

fix: $(STAMPS)/build ## mend what the checks can mend by themselves
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/torchmig config markdown > docs/options.md

bench: setup ## measure the steady-state cost in pairs of runs, checkpoints, and the repository
	@$(BIN)/python -m benchmarks.steady_state
	@$(BIN)/python -m benchmarks.checkpoints
	@$(BIN)/python -m benchmarks.bench_repo

clean: ## remove all that the other targets made
	rm -rf .venv .criu .stamps build dist *.egg-info torchmig/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment is new where another Python is named: the stamp holds the name.
$(STAMPS)/python: FORCE
	@mkdir -p $(STAMPS)
	@echo '$(PYTHON)' | cmp -s - $@ || echo '$(PYTHON)' > $@

$(STAMPS)/venv: $(STAMPS)/python tools/system_packages.sh tools/overlay.py
	@sh tools/system_packages.sh $(PYTHON)
	@[ "$$(.venv/bin/python -c '$(IDENTITY)' 2> /dev/null)" = "$$($(PYTHON) -c '$(IDENTITY)')" ] || \
		$(PYTHON) -m venv --clear .venv
	@$(if $(TORCHMIG_PYTHON),$(PYTHON) tools/overlay.py .venv,rm -f .venv/lib/python3*/site-packages/torchmig_overlay.pth)
	@touch $@

$(STAMPS)/packages: $(STAMPS)/venv requirements-torch.txt requirements.txt requirements-dev.txt
	@echo 'installing packages'
	@$(if $(TORCHMIG_PYTHON),true,$(PIP_INSTALL) -r requirements-torch.txt)
	@$(PIP_INSTALL) -r $(REQUIREMENTS)
	@touch $@

$(STAMPS)/build: $(STAMPS)/packages $(SOURCES)
	@echo 'building the extension'
	@$(PIP_INSTALL) --no-build-isolation --no-deps -e .
	@touch $@

# Asked each time, since a criu that was there may have gone; the answer takes a moment.
criu: $(STAMPS)/build
	@$(BIN)/python -c 'from torchmig.criu import find_criu; import os; \
	find_criu(os.environ.get("TORCHMIG_CRIU"))' 2> /dev/null || sh tools/criu_prefix.sh .criu

FORCE:
