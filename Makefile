# Two commands for a newcomer: `make demo` and `make test`. Both work in their own .venv (the tests' load generator in
# .venv-load, clients with other pins in .venv-clients, what builds the wheel in .venv-wheel); stamp files keep a second run from installing again, so it needs
# no network.

VENV := .venv
BIN := $(VENV)/bin
LOAD_VENV := $(VENV)-load
CLIENTS_VENV := $(VENV)-clients
WHEEL_VENV := $(VENV)-wheel
# An editable install runs no CMake; the build backend would fetch one all the same.
PIP_INSTALL := CMAKE_EXECUTABLE=none CMAKE_MAKE_PROGRAM=none $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
LOAD_PIP := $(BIN)/python -m pip --disable-pip-version-check --python $(LOAD_VENV)/bin/python
CLIENTS_PIP := $(BIN)/python -m pip --disable-pip-version-check --python $(CLIENTS_VENV)/bin/python
WHEEL_PIP := $(BIN)/python -m pip --disable-pip-version-check --python $(WHEEL_VENV)/bin/python
VARIANTS ?=
DIST ?= dist
PROMPT ?= In one sentence: why does the moon have phases?
WORKLOADS ?= offline64 single
BENCH_DIR := build/bench

.DEFAULT_GOAL := help
# What the first run of a target takes, said before it starts: `du` of x86-64 Linux, times of two cores (CONTRIBUTING.md).
NEW_DEMO := installs 1.1 GB into $(VENV) (torch 0.75 GB, with libraries for GPUs more; about 75 s), fetches a model of 94 MB, compiles the kernels
NEW_TEST := installs 4.2 GB into $(VENV), $(VENV)-clients and $(VENV)-wheel, fetches models of 180 MB

.PHONY: help say-demo say-test demo test test-slow test-sanitizers lint types strict-types imports docs vendor bench wheel clean

help:
	@echo "make demo       install, fetch the default model, answer a prompt (PROMPT='...')"
	@echo "make test       install with the test tools; lint, types, import contract, tests"
	@echo "make test-slow  the tests that take longer or need larger models"
	@echo "make test-sanitizers  kernel tests under ASan and UBSan, threads under TSan"
	@echo "make lint       format, lint, types, import contract only"
	@echo "make docs       write the reference pages of docs/ from the code again"
	@echo "make vendor     fetch the libraries of the pages from npm again, as libraries.json names them"
	@echo "make bench      throughput of the default model on WORKLOADS='$(WORKLOADS)'"
	@echo "make wheel      the wheel, in $(DIST): kernels for all kinds of x86-64 CPUs, or VARIANTS='avx2 avx512_bf16'"
	@echo "make clean      remove $(VENV), $(VENV)-* and build output"

say-demo:
	@test -e $(VENV)/.installed || echo "make demo: $(NEW_DEMO)"

say-test:
	@test -e $(WHEEL_VENV)/.installed || echo "make test: $(NEW_TEST)"
	@echo "make test: lint, types and tests take 15 to 16 minutes on two cores of Zen 5, 23 to 27 on two of Zen 3"

demo: say-demo $(VENV)/.installed
	@$(BIN)/pagoda generate --chat --temperature 0 --max-tokens 64 "$(PROMPT)"

# The tests start hundreds of processes, which read compiled modules even where the environment says not to write them.
test test-slow: export PYTHONDONTWRITEBYTECODE :=

# Each worker begins with one half of the files in their order, so that nearly all servers and references of a file are made
# once; one that is done takes over half of what is left to the other, so that none waits at the end. `doctor` compiles the
# kernels, which otherwise both do at the same time.
test: say-test lint $(CLIENTS_VENV)/.installed $(WHEEL_VENV)/.installed
	$(BIN)/pagoda models pull smollm2-135m minilm-l6
	$(BIN)/pagoda doctor
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow"

test-slow: $(VENV)/.installed-test $(LOAD_VENV)/.installed $(CLIENTS_VENV)/.installed $(WHEEL_VENV)/.installed
	$(BIN)/pagoda models pull smollm2-135m gemma3-270m minilm-l6 whisper-tiny.en whisper-base
	$(BIN)/python -m pytest -q -m slow
	$(BIN)/python -m pytest -q --hypothesis-profile thorough tests/server/test_parsers.py tests/server/test_tool_formats.py tests/server/test_schema.py

test-sanitizers: $(VENV)/.installed-test
	$(BIN)/python -m tests.kernels.sanitizers

# The two type checks take most of the time, each on one core.
lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs 2 types strict-types imports

types:
	$(BIN)/basedpyright

strict-types:
	$(BIN)/basedpyright --project .ci/strict-types.json --pythonpath $(BIN)/python

imports:
	$(BIN)/lint-imports

docs: $(VENV)/.installed-test
	$(BIN)/python docs/reference/generate.py

vendor: $(VENV)/.installed
	$(BIN)/python .ci/vendor.py

bench: $(VENV)/.installed
	@mkdir -p $(BENCH_DIR)
	@for name in $(WORKLOADS); do \
	  $(BIN)/python benchmarks/workload.py $$name > $(BENCH_DIR)/$$name.json && \
	  $(BIN)/pagoda bench throughput --workload $(BENCH_DIR)/$$name.json || exit 1; \
	done

# auditwheel replaces the tag of the building machine by that of the oldest systems on which the wheel works.
wheel: export PATH := $(abspath $(WHEEL_VENV))/bin:$(PATH)
wheel: $(WHEEL_VENV)/.installed
	@rm -rf build/unaudited
	@$(WHEEL_PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir build/unaudited \
	  --config-settings "cmake.define.PAGODA_VARIANTS=$(VARIANTS)" .
	@auditwheel repair --wheel-dir $(DIST) build/unaudited/*.whl

clean:
	rm -rf $(VENV) $(LOAD_VENV) $(CLIENTS_VENV) $(WHEEL_VENV) build dist

# The first Python of 3.11 to 3.13 that runs and can make an environment; PYTHON=... overrides.
$(BIN)/python:
	@for python in $(PYTHON) python3.11 python3.12 python3.13 python3; do \
	  if $$python -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
	  then echo "making $(VENV) with $$python" && exec $$python -m venv $(VENV); fi; \
	done; \
	echo "pagoda needs Python 3.11, 3.12 or 3.13 with the venv module (Debian: apt install python3-venv)" >&2; exit 1

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing pagoda into $(VENV)"
	@$(PIP_INSTALL) --editable ".[serve]"
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt tests/plugins/pagoda_npu/pyproject.toml | $(BIN)/python
	@echo "installing pagoda with the test tools into $(VENV)"
	@$(PIP_INSTALL) --editable ".[test]" --editable tests/plugins/pagoda_npu
	@touch $@ $(VENV)/.installed

# The load generator needs versions that $(VENV) must not have. A .pth lets it find the rest there (torch is large), so
# nothing but the listed packages is installed; `pip check` sees both.
$(LOAD_VENV)/.installed: requirements-load.txt $(VENV)/.installed-test
	@echo "installing the load generator into $(LOAD_VENV)"
	@$(BIN)/python -m venv --clear --without-pip $(LOAD_VENV)
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  $(BIN)/python -c "$$site" > "$$($(LOAD_VENV)/bin/python -c "$$site")/tests.pth"
	@$(LOAD_PIP) install --quiet --no-deps --requirement requirements-load.txt
	@$(LOAD_PIP) check
	@touch $@

# Clients over openai 3, and lm-eval, in the same way. Three lists are longer than what is installed or differ from it:
# those of lm-eval and instructor (see requirements-clients.txt), and that of $(VENV)'s litellm, which wants openai 2.
$(CLIENTS_VENV)/.installed: requirements-clients.txt $(VENV)/.installed-test
	@echo "installing clients of the server into $(CLIENTS_VENV)"
	@$(BIN)/python -m venv --clear --without-pip $(CLIENTS_VENV)
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  $(BIN)/python -c "$$site" > "$$($(CLIENTS_VENV)/bin/python -c "$$site")/tests.pth"
	@$(CLIENTS_PIP) install --quiet --no-deps --requirement requirements-clients.txt
	@! $(CLIENTS_PIP) check | grep -v -e "^lm-eval " -e "^instructor " -e "^litellm "
	@touch $@

$(WHEEL_VENV)/.installed: requirements-wheel.txt | $(BIN)/python
	@echo "installing what builds the wheel into $(WHEEL_VENV)"
	@$(BIN)/python -m venv --clear --without-pip $(WHEEL_VENV)
	@$(WHEEL_PIP) install --quiet --no-deps --requirement requirements-wheel.txt
	@$(WHEEL_PIP) check
	@touch $@
