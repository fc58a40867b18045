# make demo    sets everything up and shows one base model and three adapters answering in one batch
# make serve   leaves both services up
# make test    every check; what CI runs
# make test-slow    what a default run leaves out: more of the same parameters, more rounds, minutes of faults
# make test-faults    both services under faults, the long ones included; prints recovery times
# make bench   tokens per second beside transformers + PEFT
# make bench-registry    the registry with 100,000 adapters, on Postgres and on SQLite
# make bench-load    first tokens and tokens a second at 50, 80 and 100 % of what can be answered; SECONDS=60 of each
# make bench-soak    a quarter of an hour at twice that: whether memory stays flat; MINUTES=15, at least 5 to prove it
# make bench-kernels, make bench-engine    on a GPU: kernels against their byte floor, time per token of an 8B shape
# make locks   writes what the images install, with hashes (deploy/docker/*.lock); needs a package index
# make kinds-table    tries every kind of adapter on six base models against PEFT; README's table

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  := models/SmolLM2-135M-Instruct
PROTOS := $(wildcard protos/loraplex/*/v1/*.proto)
PIP    := $(BIN)/python -m pip install --disable-pip-version-check --no-color -c constraints.txt
LOCK   := $(BIN)/uv pip compile --quiet pyproject.toml deploy/docker/build.in -c constraints.txt --generate-hashes \
	--python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-header --no-annotate --no-emit-index-url --no-emit-find-links
QUIET  := 2>&1 | grep --line-buffered -v -e 'already satisfied' -e '^WARNING: Location' -e '^Looking in'

SHELL       := bash
.SHELLFLAGS := -o pipefail -c

.PHONY: help setup setup-dev model demo serve test test-py test-slow test-faults lint proto stubs manifests bench bench-registry bench-load bench-soak bench-kernels bench-engine locks kinds-table adapters clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev
model: $(MODEL)/model.safetensors

$(VENV)/bin/python:
	@echo "==> creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 …"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "venv is missing: apt-get install python3-venv"; exit 1; }

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "==> installing Loraplex and what it needs into $(VENV) (minutes the first time)"
	@$(PIP) -e '.[inference,examples]' $(QUIET)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "==> installing the test tools into $(VENV)"
	@$(PIP) -e '.[inference,examples,dev]' $(QUIET)
	@touch $@

$(MODEL)/model.safetensors: $(VENV)/.installed
	@echo "==> converting the base model (once)"
	@$(BIN)/python -m examples.base_model --out $(MODEL)

demo: model
	@$(BIN)/python -m examples.demo

serve: model
	@trap : INT; $(BIN)/python -m examples.serve

test: setup-dev lint proto manifests test-py

test-py: setup-dev model
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test-slow: setup-dev model
	$(BIN)/python -m pytest -m slow

test-faults: setup-dev model
	$(BIN)/python -m pytest -s --pause 0.05 -m 'slow or not slow' tests/e2e tests/registry_service/test_registry_kills.py

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .
	$(BIN)/lint-imports

proto: setup-dev
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/python tests/protos/check_stubs.py

stubs: setup-dev
	$(BIN)/buf format -w
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. \
		--mypy_out=. --mypy_grpc_out=only_async:. $(PROTOS:protos/%=%)

manifests: setup-dev
	$(BIN)/python -m deploy.k8s.validate

bench: setup-dev model
	$(BIN)/python -m tests.bench.throughput

bench-registry: setup-dev
	GRPC_VERBOSITY=ERROR $(BIN)/python -m tests.bench.registry --json build/bench-registry.json

bench-load: setup-dev model
	$(BIN)/python -m tests.bench.load $(addprefix --device ,$(DEVICE)) $(addprefix --seconds ,$(SECONDS)) --json build/bench-load.json

bench-soak: setup-dev model
	$(BIN)/python -m tests.bench.soak $(addprefix --device ,$(DEVICE)) $(addprefix --minutes ,$(MINUTES)) --json build/bench-soak.json

bench-kernels: setup-dev
	$(BIN)/python -m kernels.bench --json build/bench-kernels.json
	$(BIN)/python -m kernels.bench.ops --json build/bench-ops.json

bench-engine: setup-dev
	$(BIN)/python -m tests.bench.engine --json build/bench-engine-r16.json
	$(BIN)/python -m tests.bench.engine --adapters 8 --counts 8 --rank 64 --loads D --json build/bench-engine-r64.json
	$(BIN)/python -m tests.bench.served --json build/bench-served.json
	$(BIN)/python -m tests.bench.exact_bf16 --wide --json build/exact-bf16.json

locks: setup-dev
	$(LOCK) --extra tracing -o deploy/docker/registry.lock
	$(LOCK) --extra inference --extra tracing -o deploy/docker/inference.lock

kinds-table: setup-dev model
	$(BIN)/python -m pytest -m 'slow or not slow' tests/kinds --deselect tests/kinds/test_table.py
	$(BIN)/python -m tests.kinds.table

adapters: setup-dev model
	$(BIN)/python -m examples.train --base $(MODEL) --out examples/adapters

clean:
	rm -rf $(VENV) models build var .cache
