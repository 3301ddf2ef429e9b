# Two commands do everything: `make demo` and `make test`. Both set up .venv first; the second time that is a no-op.
SHELL := bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || echo python3)
LOCK := integration/requirements-cpu.txt
UV_VERSION := 0.13.9

# torch's CPU build: from the directory in PIP_FIND_LINKS where that is set (uv does not read it), else from its own index.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
TORCH := $(if $(UV_FIND_LINKS),,--torch-backend cpu)
# Byte code pays: every vLLM process imports thousands of modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env demo test lint unit docs integration sweep faults soak bench lock clean

help:            ## this list
	@grep -hE '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*## /\t/' | expand -t 16

env: $(VENV)/.ready   ## the environment: vLLM for CPU, NIXL, router, tests (about a minute, 4 GB)

$(VENV)/.ready: $(LOCK) pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --compile-bytecode $(TORCH) $(LOCK)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@

demo: env        ## prefill, decode and router on the CPU with a tiny hybrid model; ARGS="--prefill-tp 2" and the like
	$(BIN)/hybrid-connector demo $(ARGS)

test: lint unit docs integration   ## everything that needs no GPU

lint: env        ## ruff and mypy --strict
	$(BIN)/ruff check src tests integration docs
	$(BIN)/ruff format --check src tests integration docs
	$(BIN)/mypy
	$(BIN)/hadolint docker/Dockerfile docker/Dockerfile.cpu docker/Dockerfile.router

unit: env        ## tests/: no vLLM, no NIXL, under a minute
	$(BIN)/python -m pytest tests -q

integration: env ## integration/: real NIXL, real vLLM engines, the real router
	$(BIN)/python -m pytest integration -q

docs: env        ## the documentation into build/site; any warning fails
	$(BIN)/python docs/site/generate.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml

faults: env      ## faults on real engines: what becomes of requests; ARGS=--without-guards shows that the bench can tell
	$(BIN)/python integration/fault_bench.py $(ARGS)
	$(BIN)/python integration/fuzz.py

soak: env        ## 2,000 requests through router, P and D, aborts, a restart of P; then nothing may have grown
	$(BIN)/python integration/soak.py $(ARGS)

# P and D of either connector three times in turn, so that a slower minute of the machine meets both.
ENGINES := $(BIN)/python integration/gpu/compare.py --device cpu --tiny --work-dir build/bench/engines
TURNS := --pairs in-tree/LBHNC ours/LBHNC ours/LBHNC in-tree/LBHNC in-tree/LBHNC ours/LBHNC
# 100,000 blocks in 16 layers take 6.5 GB a side.
MANY_BLOCKS := --kind jamba --layers 16 --size hidden_size=64 num_attention_heads=2 num_kv_heads=1 head_dim=32 --blocks 100000

bench: env       ## transfers through NIXL in every way, binding, whole engines beside the in-tree connector; in build/bench
	rm -rf build/bench && mkdir -p build/bench
	$(BIN)/python integration/benchmarks/transfer.py --scale 8 --output build/bench/transfer.jsonl
	$(BIN)/python integration/benchmarks/bind.py --output build/bench/bind.jsonl
	$(ENGINES) $(TURNS) --prompts 256 1024 --concurrency 1 8 64 --repeats 15 --out build/bench/engines.jsonl
	rm -rf build/bench/engines
	$(ENGINES) $(MANY_BLOCKS) $(TURNS) --prompts 256 --concurrency 1 --no-verify --out build/bench/blocks.jsonl
	$(BIN)/python integration/benchmarks/report.py build/bench/transfer.jsonl build/bench/bind.jsonl \
	  build/bench/engines.jsonl --pictures build/bench
	$(BIN)/python integration/benchmarks/report.py build/bench/blocks.jsonl

sweep: env       ## every family and geometry against a byte oracle, and the in-tree connector's arithmetic beside it
	$(BIN)/python -m hybrid_connector.tools.sweep_geometry

lock: env        ## resolve the locked versions anew
	$(BIN)/uv pip compile --quiet --no-header --no-annotate --python-version 3.11 --extra cpu --extra test --extra docs \
	  pyproject.toml --output-file $(LOCK) <(echo setuptools; echo uv==$(UV_VERSION))

clean:           ## remove the environment
	rm -rf $(VENV)
