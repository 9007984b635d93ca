# Every target makes .venv by itself on a fresh machine and reuses it afterwards.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup browser compiler test test-all check docs links demo bench results dist clean

help:
	@echo "make demo    minutes: a few methods, fifteen corruptions, a table and a report"
	@echo "make test    the test suite (minutes)"
	@echo "make test-all  the suite with its long forms: every contract check on every network, long Ray, chaos and ranks"
	@echo "make check   ruff, mypy --strict, the lock of the dependencies, the import-direction test, and the docs"
	@echo "make docs    the site in docs/_build/html; a warning, such as a broken link, is an error"
	@echo "make links   open every external link of the docs (needs the network)"
	@echo "make bench   what a step costs relative to the bare network (minutes); with DEVICE=cuda on that device"
	@echo "make results measure docs/results again (days; ONLY=demo,full for some, CIFAR=folder of CIFAR-10)"

setup: $(READY)

# Every package is checked against the hashes of the lock, but torch, whose builds differ by platform.
PIP := $(BIN)/pip --quiet --disable-pip-version-check
$(READY): pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ctta needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --require-hashes --no-deps --requirement requirements.lock
	$(PIP) install --constraint constraints.txt torch
	$(PIP) install --no-deps --no-build-isolation --editable .
	touch $(READY)

# The report is looked at in a real browser.
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
browser:
	@{ command -v chromium && command -v chromedriver; } >/dev/null || \
	{ $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq chromium chromium-driver; } || \
	{ echo "the tests need chromium and chromedriver on the PATH (Debian: chromium and chromium-driver)"; exit 1; }

# The simulated accelerator of the tests is a library in C++, which is built once per machine.
compiler:
	@command -v $${CXX:-g++} >/dev/null || \
	{ $(SUDO) apt-get update -qq && $(SUDO) apt-get install -y -qq g++; } || \
	{ echo "the tests need a C++ compiler on the PATH (Debian: g++), or its name in CXX"; exit 1; }

test: $(READY) browser compiler
	$(BIN)/pytest

test-all: $(READY) browser compiler
	$(BIN)/pytest -m ""

check: $(READY) docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python scripts/lock.py --check
	$(BIN)/pip check
	$(BIN)/pytest -q -n 0 tests/test_layout.py

# Read anew, so that a warning of an earlier build is not forgotten.
docs: $(READY)
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet --jobs auto docs docs/_build/html

# Not part of check: whether other servers answer is not decided here.
links: $(READY)
	$(BIN)/python -m sphinx --builder linkcheck --quiet docs docs/_build/links

demo: $(READY)
	$(BIN)/ctta demo

ifdef DEVICE
bench: $(READY)
	$(BIN)/python -m benchmarks.speed.device --device $(DEVICE) --out bench-$(DEVICE).md
	$(BIN)/python -m benchmarks.speed.precision --device $(DEVICE) | tee -a bench-$(DEVICE).md
else
bench: $(READY)
	$(BIN)/python -m benchmarks.speed.run
	$(BIN)/python -m benchmarks.speed.corruptions
	$(BIN)/python -m benchmarks.speed.streams
endif

results: $(READY)
	$(BIN)/python -m benchmarks.results.run $(if $(ONLY),--only $(ONLY)) $(if $(CIFAR),--cifar $(CIFAR))

dist: $(READY)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python scripts/check_distribution.py

clean:
	rm -rf $(VENV) docs/_build docs/reference/api .mypy_cache .pytest_cache .ruff_cache .hypothesis
