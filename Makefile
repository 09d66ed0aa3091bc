# make serve   set up, then serve the bundled checkpoint on http://127.0.0.1:8000
# make test    set up, then run the tests
# make setup   .venv with the `longspan` command; compiles the kernels; again when they or pyproject.toml change
# make test-vllm  set up .venv-vllm with vLLM in it, then run the tests of the cluster host
# make lint    ruff and pyright
# make soak    MINUTES (20) of mixed load on a server, every answer checked; the report is docs/soak.md
# make sanitize  the tests of the kernels under address, undefined and thread sanitizers (half an hour)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= models/k31-tiny
PORT ?= 8000
MINUTES ?= 20

VLLM := .venv-vllm

.PHONY: setup setup-vllm serve test test-vllm lint soak sanitize clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml $(wildcard native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Longspan needs Python 3.11 or later, found $$($(PYTHON) --version). Set PYTHON=python3.x"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "Python's venv module is missing. On Debian: apt-get install python3-venv"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing dependencies and compiling the kernels for each instruction set: some minutes, without output."
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

setup-vllm: $(VLLM)/.installed

$(VLLM)/.installed: $(VENV)/.installed tools/setup_vllm.sh
	@echo "Installing vLLM: some minutes, without output."
	tools/setup_vllm.sh
	@touch $@

serve: setup
	$(BIN)/longspan serve $(MODEL) --port $(PORT)

test: setup
	$(BIN)/python -m pytest

test-vllm: setup-vllm
	$(BIN)/pyright -p tools/pyright-vllm.json
	$(VLLM)/bin/python -m pytest tests/plugin_vllm

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

soak: setup
	cd tools && $(CURDIR)/$(BIN)/python -m soak --model $(abspath $(MODEL)) --minutes $(MINUTES) \
	  --kill-worker --report $(CURDIR)/docs/soak.md

sanitize: setup
	for kind in address undefined thread; do tools/sanitize.sh $$kind || exit 1; done

clean:
	rm -rf $(VENV) $(VLLM) build dist .pytest_cache .ruff_cache .hypothesis
