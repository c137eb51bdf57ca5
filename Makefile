# A fresh clone needs nothing done first: every target below builds what it lacks.
#
#   make demo        k3-mini, a small Kimi K3 that is bundled: checked, sharded, served on two ranks,
#                    asked about text and images; report in build/demo/report.html
#   make demo-smollm2   the same with SmolLM2-135M, fetched (93 MB)
#   make test        the whole suite           make test-fast   without the slow tests
#   make test-thorough   whole smoke runs against damaged models and altered services, a minute each
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
SMOLLM2_DIR ?= build/demo-smollm2
# Test files are dealt to so many processes, one a core; JOBS=1 runs them one after another.
JOBS ?= logical
PROMPT ?=
TP ?=
BENCH ?=

BIN := $(VENV)/bin
PACKAGE := $(VENV)/.package
INSTALLED := $(VENV)/.installed
KERNELS := $(VENV)/.kernels
INSTALLED310 := $(VENV310)/.installed
BUNDLED := src/firstlight/data/k3_mini
LOOKUP := zebra=412\napple=7\nriver=93\n\nWhat is "zebra"?
KERNEL_SOURCES := $(wildcard src/firstlight/kernels/*.py src/firstlight/kernels/cpp/*)

# Compiled once, as PYTHONDONTWRITEBYTECODE would have each of hundreds of processes do it anew.
COMPILE = python -m compileall -q src
PYTEST = python -m pytest -n $(JOBS) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.DELETE_ON_ERROR:
.PHONY: demo demo-smollm2 test test-fast test-thorough test-py310 test-emulated check lint types architecture bench serve build clean

# Lines of a prompt are written as \n.
demo: export ASKED = $(or $(PROMPT),$(LOOKUP))
demo: $(KERNELS)
	@$(BIN)/firstlight up $(BUNDLED) --store $(DEMO_DIR)/store --tp $(or $(TP),2) \
	    --profile k3-mini --html $(DEMO_DIR)/report.html \
	    --ask "$$(printf '%b' "$$ASKED")" -- --kv-budget-bytes 256MiB

demo-smollm2: $(KERNELS)
	@gguf=$$($(BIN)/python scripts/fetch_smollm2.py) && \
	$(BIN)/firstlight up "$$gguf" --store $(SMOLLM2_DIR)/store --tp $(or $(TP),1) \
	    --profile smollm2-135m --ask "$(or $(PROMPT),What is the capital of France?)"

test: $(INSTALLED) $(KERNELS)
	$(BIN)/$(COMPILE)
	$(BIN)/$(PYTEST) -m "not thorough"

test-thorough: $(INSTALLED) $(KERNELS)
	$(BIN)/python -m pytest -m thorough

test-fast: $(INSTALLED) $(KERNELS)
	$(BIN)/$(COMPILE)
	$(BIN)/$(PYTEST) -m "not slow and not thorough"

test-emulated: $(INSTALLED) $(KERNELS)
	$(BIN)/$(COMPILE)
	$(BIN)/$(PYTEST) tests/emulator

test-py310: $(INSTALLED310)
	$(VENV310)/bin/$(COMPILE)
	$(VENV310)/bin/$(PYTEST) --torch-free -m "not slow and not thorough"

check: lint types architecture test-py310

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy

architecture: $(INSTALLED)
	$(BIN)/python -m pytest -q tests/architecture

bench: $(INSTALLED) $(KERNELS)
	@test -f $(SMOLLM2_DIR)/store/COMPLETE || $(MAKE) --no-print-directory demo-smollm2
	@test -f $(SMOLLM2_DIR)/hf/config.json || \
	  $(BIN)/firstlight export $(SMOLLM2_DIR)/store $(SMOLLM2_DIR)/hf
	$(BIN)/python benchmarks/serving.py --model $(SMOLLM2_DIR)/hf --store $(SMOLLM2_DIR)/store --write \
	  --firstlight-command "$(BIN)/firstlight serve {store} --port {port} --kv-budget-bytes 1GiB" \
	  --kv-bytes 1073741824 $(BENCH)

serve: $(KERNELS)
	@test -f $(DEMO_DIR)/store/COMPLETE || $(MAKE) --no-print-directory demo
	$(BIN)/firstlight serve $(DEMO_DIR)/store --tp $(or $(TP),2)

build: $(KERNELS)

$(VENV)/.torch: Makefile
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(if $(strip $(TORCH)),$(BIN)/python -m pip install -q $(TORCH),@echo "using the torch already there")
	@$(BIN)/python -c "import torch; print('torch', torch.__version__)"
	@touch $@

$(PACKAGE): pyproject.toml $(VENV)/.torch
	$(BIN)/python -m pip install -q -e .
	@touch $@

$(INSTALLED): $(PACKAGE)
	$(BIN)/python -m pip install -q -e ".[test,dev]"
	@touch $@

$(KERNELS): $(PACKAGE) $(KERNEL_SOURCES)
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
