PYTHON ?= python3
ARGS ?=

.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
SLIPSTREAM := $(VENV)/bin/slipstream
PYTEST := $(PY) -m pytest -n 4 --dist loadfile --no-loadscope-reorder
# The path is in the name because an environment that was moved with its checkout does not work.
STAMP := $(VENV)/.installed-$(shell echo '$(CURDIR)' | cksum | cut -d ' ' -f 1)

# Rename the directory of an earlier run, unless this run resumes it. A learner that still writes to it has it locked.
set_aside = [ ! -e $(1) ] || [ -n "$(findstring --resume,$(ARGS))" ] || \
	flock -n $(1)/.lock mv $(1) "$(1)-$$(date -r $(1) +%Y%m%d-%H%M%S)" || \
	{ echo "a learner is writing to $(1); wait until it is done, or stop it" >&2; exit 1; }

# What cannot start cannot be up to date.
ifneq ($(shell $(PY) -c 'print("starts")' 2>/dev/null),starts)
$(STAMP): FORCE
endif

.PHONY: help install demo real test test-system chaos gpu-bench lint docs lock keys clean FORCE
FORCE:

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## install the CPU stack into .venv (PYTHON=python3.12 picks the Python)
	@echo "$(VENV) is up to date; next: make demo"

demo: $(STAMP)  ## train a tiny model on the CPU with the whole system, ends with a report
	@$(call set_aside,runs/demo)
	@$(SLIPSTREAM) colocate deploy/recipes/reverse.toml $(ARGS)

real: $(STAMP)  ## train a pretrained model, SmolLM2-135M-Instruct, on sums: 9 to 19 minutes on two cores with AMX or AVX-512 BF16
	@$(call set_aside,runs/smollm2)
	@$(SLIPSTREAM) colocate deploy/recipes/smollm2.toml $(ARGS)

test: $(STAMP)  ## run the tests of every commit (ARGS="-k loss -x")
	@$(PYTEST) -m "not system and not gpu and not slow" $(ARGS)

test-system: $(STAMP)  ## run those that need real vLLM, several ranks, two hosts or a browser
	@$(PYTEST) -m "system and not gpu and not slow" $(ARGS)

chaos: $(STAMP)  ## kill, stop and cut off every part of a run: 3 faults with vLLM, 27 with a fake engine
	@$(PY) -m tests.chaos --engine real --faults 3 $(ARGS)
	@$(PY) -m tests.chaos --engine fake --faults 12 $(ARGS)
	@$(PY) -m tests.chaos --engine fake --faults 3 --environment $(ARGS)
	@$(PY) -m tests.chaos --engine fake --faults 3 --agent $(ARGS)
	@$(PY) -m tests.chaos --engine fake --faults 3 --evaluation $(ARGS)
	@$(PY) -m tests.chaos --engine fake --faults 3 --reference $(ARGS)
	@$(PY) -m tests.chaos --engine fake --faults 3 --servers 3 $(ARGS)

gpu-bench:  ## on a GPU: server, learner and weight sync next to TRL, in the active environment (docs/benchmarks-gpu.md)
	@$(PYTHON) -m tests.bench.gpu $(ARGS)

lint: $(STAMP)  ## ruff, formatting and mypy
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m mypy

docs: $(STAMP)  ## build docs/ into site/; a broken link or anchor is an error
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@echo "site/ is built; to read it: python3 -m http.server --bind 127.0.0.1 -d site"

lock:  ## resolve deploy/cpu.lock anew
	@$(PYTHON) deploy/cpu_environment.py lock

keys: $(STAMP)  ## make CURVE keys for server and learner in keys/ (ARGS=DIR: elsewhere)
	@$(SLIPSTREAM) keys $(or $(ARGS),keys)

clean:  ## remove .venv and all caches; runs/ stays, with its checkpoints: delete what you no longer need by hand
	@rm -rf $(VENV) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml deploy/cpu.lock
	@command -v $(PYTHON) >/dev/null || { echo "install: '$(PYTHON)' was not found; install Python 3.11 or newer, or name it: make install PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) deploy/cpu_environment.py install
	@touch $@
