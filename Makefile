# Targets run in $(VENV), except `check`.  `make setup` builds it, and each target that needs it calls `setup` first.
VENV   ?= .venv
PYTHON ?=
export VENV PYTHON
# Programs that only tests use; `make demo` and the benchmarks do without them.
test stress: export WITH_TESTS := 1

BIN    := $(VENV)/bin
LINTED := .
# Test processes at a time; each keeps about one core and 3 GB busy.
JOBS   ?= 2
LINKED := $(wildcard package/*) daemon kv shmring connector systemd docs
# A machine with a GPU brings its own Python: no setup, and no plugins of its pytest.
ON_GPU  = PYTHONPATH=build/links:. PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONUNBUFFERED=1 $(or $(PYTHON),$(BIN)/python)

# The quick tier: an environment of its own without vLLM, torch and Mooncake, and the tests that can do without.
CHECK_VENV  ?= .venv-check
CHECK_TESTS ?= tests/kv tests/shmring tests/daemon tests/models tests/chart tests/bench \
	tests/connector/test_config.py tests/connector/test_policy.py \
	tests/test_docs.py tests/test_house.py tests/test_imports.py tests/test_operations.py tests/test_private.py tests/test_readme.py tests/test_site.py tests/install/test_release.py
ROOM ?= daemon/planning
# Per cent of the package's lines that the tests must reach. To count them takes twice as long, so CI does it.
COVERAGE ?=

.DEFAULT_GOAL := help
.PHONY: help setup room check test test-vllm-versions vllm-names lint links format stress faults fuzz gpu wheel demo bench bench-served bench-serve bench-engine-thread bench-daemon bench-cuda walk docs release clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-20s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## build the virtual environment (VENV=.venv; PYTHON=python3.12 to choose the interpreter)
	@.ci/setup
	@$(MAKE) --no-print-directory links

$(CHECK_VENV)/.done: pyproject.toml $(wildcard shmring/_*.[ch])
	@$(or $(PYTHON),python3) -m venv $(CHECK_VENV)
	@rm -f shmring/_atomics.*.so  # one of an older build may hide the new one
	@$(CHECK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[check]'
	@touch $@

room: $(CHECK_VENV)/.done ## the tests of one room, in some seconds: ROOM=daemon/planning, shmring, kv, daemon/door, …
	@$(CHECK_VENV)/bin/python -m pytest -q -m "not store and not vllm and not stress" tests/$(ROOM)

check: $(CHECK_VENV)/.done ## lint, types and the tests without vLLM, torch and Mooncake: two minutes from a clone
	@$(MAKE) --no-print-directory lint VENV=$(CHECK_VENV)
	@$(CHECK_VENV)/bin/python -m pytest -n $(JOBS) -m "not store and not vllm and not stress" \
		$(if $(COVERAGE),--cov --cov-fail-under=$(COVERAGE) --cov-report=) $(CHECK_TESTS)

# Files start in the order of tests/conftest.py.  Otherwise the slowest ones, with few tests, start last, and one
# process is left alone.
test: setup lint ## set up, check, and run the default tests, those against real vLLM and Mooncake included
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --record

test-vllm-versions: setup links ## run the suites that depend on vLLM against the other served series (SERIES="0.31 0.33")
	@.ci/vllm-versions test $(ARGS)

vllm-names: setup ## compare the hooks and names of the newest vLLM with those that the connector uses
	@.ci/vllm-versions names

# The linters need no vLLM: those of $(VENV) where it has them, else those of the quick tier.
LINT_BIN := $(if $(wildcard $(BIN)/mypy),$(BIN),$(CHECK_VENV)/bin)

# A checkout that was updated: the extension is older than its sources.
EXTENSION := shmring/_atomics.abi3.so
$(EXTENSION): $(wildcard shmring/_*.[ch])
	@rm -f shmring/_atomics.*.so
	@cc -std=c11 -O2 -Wall -Wextra -shared -fPIC -I"$$($(LINT_BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["include"])')" $(filter %.c,$^) -o $@

lint: $(if $(wildcard $(BIN)/mypy),,$(CHECK_VENV)/.done) links $(EXTENSION) ## ruff (rules and format), mypy (package, benchmarks and tests) and codespell
	@$(LINT_BIN)/python -m ruff check --quiet $(LINTED)
	@$(LINT_BIN)/python -m ruff format --quiet --check $(LINTED) || { $(LINT_BIN)/python -m ruff format --diff $(LINTED); exit 1; }
	@$(LINT_BIN)/python -m mypy --no-error-summary
	@$(LINT_BIN)/python -m codespell_lib

links: # link the package's parts under a folder with its import name, for type checkers
	@mkdir -p build/links/kvprefetch
	@for part in $(LINKED); do ln -sfn ../../../$$part build/links/kvprefetch/$${part##*/}; done

format: $(if $(wildcard $(BIN)/mypy),,$(CHECK_VENV)/.done) ## rewrite the sources in ruff's format, imports sorted
	@$(LINT_BIN)/python -m ruff check --quiet --fix $(LINTED) || true
	@$(LINT_BIN)/python -m ruff format $(LINTED)

stress: setup ## the long tests: load and randomised faults
	@$(BIN)/python -m pytest -m stress --timeout=3600 --record

faults: setup ## kill and stop each part at each step, 500 times, and judge the rest: ARGS="--minutes 20 --publish"
	@$(BIN)/python -m tests.faults $(ARGS)

fuzz: setup ## change what others write, two minutes for each target: ARGS="control records --minutes 10"
	@$(BIN)/python -m tests.fuzz $(ARGS)

gpu: links ## ten minutes on a CUDA device (PYTHON: with torch, cupy, numpy and pytest, no vLLM); ARGS=--fake rehearses
	@$(ON_GPU) -m tests.gpu $(ARGS)

demo: setup ## two users and a store that is far: recomputed, vLLM's Mooncake connector, on demand, prefetched, all local
	@$(BIN)/python -m benchmarks.demo $(ARGS)

bench: setup ## sweeps over real engines, one JSON each: ARGS="PIECE ... [--quick] [--publish]" (docs/BENCHMARKS.md)
	@$(BIN)/python -m benchmarks.bench $(ARGS)

bench-served: setup ## served engines whose device has a modelled time, by load and link: ARGS="PIECE ... [--quick] [--publish]" (root)
	@$(BIN)/python -m benchmarks.served $(ARGS)

bench-serve: setup ## a recorded trace through vllm serve: ARGS="conversation --data DIR" or "agents …" (root)
	@$(BIN)/python -m benchmarks.serve $(ARGS)

bench-engine-thread: setup ## time of vLLM's own thread in each hook of a connector, and bells
	@$(BIN)/python -m benchmarks.engine_thread $(ARGS)

bench-daemon: setup ## keys and bytes a second of one daemon, and what is used up first (under four minutes)
	@$(BIN)/python -m benchmarks.daemon $(ARGS)

walk: setup ## calls, files and moves between files of one request, with their ceilings (a minute): ARGS="--top 40"
	@$(BIN)/python -m benchmarks.walk $(ARGS)

bench-cuda: links ## copies between staging and KV cache on a GPU (PYTHON as for gpu)
	@$(ON_GPU) -m benchmarks.cuda $(ARGS)

WITH_PIP = $(or $(PYTHON),$(wildcard $(BIN)/python),python3)
wheel: ## a wheel for this machine into dist/ (needs a C compiler)
	@$(WITH_PIP) -m pip --version >/dev/null || { echo "make wheel needs pip: run 'make setup' first, or install Debian's python3-pip"; exit 1; }
	@$(WITH_PIP) -m pip wheel -q --no-deps -w dist . && ls dist/*.whl

release: ## build the source distribution and the wheels into dist/ and check them; uploads nothing
	@.ci/release

.venv-docs/.done: pyproject.toml
	@$(or $(PYTHON),python3) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check $$(sed -n 's/^docs = \["\(.*\)"\]$$/\1/p' pyproject.toml)
	@touch $@

docs: .venv-docs/.done ## the documents as a site in build/site, built strictly (an environment of its own, .venv-docs)
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/python -m mkdocs build --strict

clean: ## remove what was built, but not the virtual environments
	@rm -rf build dist *.egg-info .coverage* .pytest_cache .mypy_cache .ruff_cache .hypothesis shmring/*.so $(VENV)/.kvprefetch-setup $(CHECK_VENV)/.done
	@find daemon shmring connector tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
