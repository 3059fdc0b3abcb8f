# Two commands are enough: `make up` serves a model, `make test` runs every test.
.PHONY: setup up test test-compose fuzz sim soak bench-client docs lint format proto clean
.DELETE_ON_ERROR:

# Compiled modules are kept, whatever the caller's habit is: each command would compile all of ours anew.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Settings of `make up`; MODEL is the directory of a Hugging Face MoE checkpoint.
MODEL ?= examples/demo
override MODEL := $(patsubst %/,%,$(MODEL))
SERVERS ?= 3
REDUNDANCY ?= 2
TRANSPORT ?= shm
HOST ?= 127.0.0.1
PORT ?= 8000
# Where to keep the processes' logs; by default they are not kept.
LOG_DIR ?=

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml setup.py eaas/wire/_flags.c eaas/wire/spin.h $(wildcard attention_client/dispatch/*.[ch] attention_client/scheduler/strategies/*.[ch]) \
  $(wildcard eaas/minmax/*.[ch]) $(wildcard balancer/policies/fractional/*.[ch]) \
  eaas/bench/dispatch/_floor.c $(wildcard expert_server/kernels/native/*) $(wildcard balancer/policies/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

up: setup
	@exec $(BIN)/eaas up --model '$(MODEL)' --servers $(SERVERS) --redundancy $(REDUNDANCY) \
	  --transport $(TRANSPORT) --host $(HOST) --port $(PORT) \
	  $(if $(LOG_DIR),--log-dir '$(LOG_DIR)')

# Three files at a time at first, since many tests wait more than they compute; then, one after another, the tests that must have the machine to
# themselves, without collecting those of all other files again.
test: setup
	status=0; \
	$(BIN)/python -m pytest -m 'not alone and not compose' -n 3 --dist loadfile --no-loadscope-reorder || status=1; \
	$(BIN)/python -m pytest -m alone $$(grep -rl --include='test_*.py' 'mark\.alone' tests) || status=1; \
	exit $$status

# Builds the image and attacks a cluster of containers; skips where `docker compose` finds no engine.
test-compose: setup
	$(BIN)/python -m pytest -m compose tests/compose

# What `make test` has a few seconds of, for minutes; FUZZ_SECONDS for each target of atheris.
FUZZ_SECONDS ?= 60
FUZZ_FACTOR ?= 20
fuzz: setup
	FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_FACTOR=$(FUZZ_FACTOR) $(BIN)/python -m pytest --timeout 3600 tests/fuzz

# 10,000 seeds of the whole cluster in simulated time, on two cores.
sim: setup
	CLUSTER_SEEDS=$(or $(SEEDS),10000) $(BIN)/python -m pytest -n 2 --dist load tests/sim/test_cluster.py

# Faults on a real cluster under load; the command says how to repeat what it finds.
soak: setup
	$(BIN)/eaas chaos run --seed $(or $(SEED),1) --minutes $(or $(MINUTES),10)

# aiperf, a client of others, drives the chat endpoint. It pins packages that ours need newer, so it has a place of its own.
AIPERF := aiperf==0.13.0
bench-client: setup .venv-bench/.installed
	$(BIN)/eaas bench client --model '$(MODEL)'

.venv-bench/.installed:
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --disable-pip-version-check '$(AIPERF)'
	@touch $@

# The site, into site/; a link or an anchor that leads nowhere ends it.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: setup proto docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@changed=$$(git status --porcelain -- eaas/rpc/v1 docs/api.md); test -z "$$changed" || \
	  { echo "$$changed"; echo "this is not what proto/ generates: commit the result of 'make proto'"; exit 1; }

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# From the root, so that the generated imports are right as they are.
proto: setup
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. proto/eaas/rpc/v1/*.proto
	$(BIN)/python docs/make_api.py

clean:
	rm -rf $(VENV) .venv-bench site build *.egg-info
