# A fresh clone needs nothing done first: every target below builds what it lacks.
#
#   make demo        SmolLM2-135M: fetched, checked, sharded, served, asked, on this machine
#   make test        the whole suite           make test-fast   without the slow tests
#   make test-emulated   the engine on an emulated accelerator (docs/guides/musa-emulator.md)
#   make check       lint, format, types, architecture, and the torch-free part on Python 3.10
#   make bench       serving figures beside transformers, written into docs/benchmarks
#   make serve       serve the store that demo made
#   make clean       remove what was built (not the download cache)
#
# A vendor's torch: make TORCH= VENV_FLAGS=--system-site-packages, or TORCH=/path/to/torch.whl
# (with its exact version, never a plain "torch": the newest is rarely what a machine can run).

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV_FLAGS ?=
VENV ?= .venv
VENV310 ?= .venv310
DEMO_DIR ?= build/demo
PROMPT ?= What is the capital of France?
TP ?= 1
BENCH ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
KERNELS := $(VENV)/.kernels
INSTALLED310 := $(VENV310)/.installed
KERNEL_SOURCES := $(wildcard src/firstlight/kernels/*.py src/firstlight/kernels/cpp/*)

.DELETE_ON_ERROR:
.PHONY: demo test test-fast test-py310 test-emulated check lint types architecture bench serve build clean

demo: $(KERNELS)
	@gguf=$$($(BIN)/python scripts/fetch_smollm2.py) && \
	$(BIN)/firstlight up "$$gguf" --store $(DEMO_DIR)/store --tp $(TP) \
	    --profile smollm2-135m --ask "$(PROMPT)"

test: $(KERNELS)
	$(BIN)/python -m pytest

test-fast: $(KERNELS)
	$(BIN)/python -m pytest -m "not slow"

test-emulated: $(KERNELS)
	$(BIN)/python -m pytest tests/emulator

test-py310: $(INSTALLED310)
	$(VENV310)/bin/python -m pytest --torch-free -m "not slow"

check: lint types architecture test-py310

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

architecture: $(INSTALLED)
	$(BIN)/python -m pytest -q tests/architecture

bench: $(KERNELS)
	@test -f $(DEMO_DIR)/store/COMPLETE || $(MAKE) --no-print-directory demo
	@test -f $(DEMO_DIR)/hf/config.json || $(BIN)/firstlight export $(DEMO_DIR)/store $(DEMO_DIR)/hf
	$(BIN)/python benchmarks/serving.py --model $(DEMO_DIR)/hf --store $(DEMO_DIR)/store --write \
	  --firstlight-command "$(BIN)/firstlight serve {store} --port {port} --kv-budget-bytes 1GiB" \
	  --kv-bytes 1073741824 $(BENCH)

serve: $(KERNELS)
	@test -f $(DEMO_DIR)/store/COMPLETE || $(MAKE) --no-print-directory demo
	$(BIN)/firstlight serve $(DEMO_DIR)/store --tp $(TP)

build: $(KERNELS)

$(VENV)/.torch: Makefile
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(if $(strip $(TORCH)),$(BIN)/python -m pip install -q $(TORCH),@echo "using the torch already there")
	@$(BIN)/python -c "import torch; print('torch', torch.__version__)"
	@touch $@

$(INSTALLED): pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install -q -e ".[test,dev]"
	@touch $@

$(KERNELS): $(INSTALLED) $(KERNEL_SOURCES)
	$(BIN)/python -m firstlight.kernels.build
	@touch $@

$(INSTALLED310): pyproject.toml scripts/find_python.sh
	python310=$$(bash scripts/find_python.sh 3.10) && "$$python310" -m venv $(VENV310)
	$(VENV310)/bin/python -m pip install -q -e ".[test]"
	@touch $@

clean:
	rm -rf $(VENV) $(VENV310) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
	find src -name "*.so" -delete
