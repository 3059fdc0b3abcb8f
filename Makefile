# Two commands are enough: `make up` serves a model, `make test` runs every test.
.PHONY: setup up test test-compose lint format proto clean
.DELETE_ON_ERROR:

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

# Two files at a time at first; then, one after another, the tests that must have the machine to themselves.
test: setup
	status=0; \
	$(BIN)/python -m pytest -m 'not alone and not compose' -n 2 --dist loadfile --no-loadscope-reorder || status=1; \
	$(BIN)/python -m pytest -m alone || status=1; \
	exit $$status

# Builds the image and attacks a cluster of containers; skips where `docker compose` finds no engine.
test-compose: setup
	$(BIN)/python -m pytest -m compose tests/compose

lint: setup proto
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
	rm -rf $(VENV) build *.egg-info
