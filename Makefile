# Every target sets up what it needs: a virtual environment, pinned packages and the build.
#   make train             run the default recipe and report what it learned
#   make test              run a selection of the tests on the CPU, about ten minutes
#   make test-all          run all tests on the CPU, hours
#   make lint              run ruff, mypy and clang-format
#   make test-ops          test the CPU kernels alone, without the peers, into PYTHON's own packages
#   make test-floor        test wheels of every build mode and every Triton kernel with the oldest torch and Triton
#   make test-floor-quick  run the part of it that CI runs
#   make test-engine       test the trainer, TRL and verl with vLLM, and Megatron-core, on the CPU; under half an hour
#   make test-processors   run the tests as other processors add up, and on two threads; half an hour
#   make soak              kill runs, break their surroundings, fuzz the ops, look for leaks; at most an hour and a half
#   make nightly           run everything slower than .ci/run: test-all, floor, engine, processors, soak, bench, results
#   make results           measure the results of docs/results again; hours, or SEEDS=0 for those of a seed
#   make bench             time the CPU against the installed peers and check every bar; about 40 minutes
#   make bench-quick       compare the steady ratios with benchmarks/baseline.json; a minute
#   make wheel             build the wheel of mode GRPO_KERNELS_BUILD (auto, none, cpu, cuda) into dist/
#   make dist              build the sdist, and wheels with and without compiled kernels, into dist/, and check them
#   make docs              build the documentation into site/
#   make gpu-check         with an NVIDIA GPU: build, time, test, sanitize; ten minutes, without a network
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# With a GPU the newest build, otherwise the pinned release with its triton.
TORCH := $(if $(shell nvidia-smi -L 2>/dev/null),"torch>=2.11",torch==2.13.0 triton==3.7.1)
# the pinned version of every package of every environment; what to install is in pyproject.toml
LOCK := tools/constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# 25.1 is the first that reads dependency groups; 26 shows a page of setuptools' advice about editable installs.
NEW_PIP := --upgrade -c $(LOCK) pip
SOURCES := $(shell find csrc -type f) CMakeLists.txt setup.py pyproject.toml $(LOCK)
CPP := $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# The oldest supported versions, if possible on Python 3.12, which most GPU machines have. torch 2.11 pins Triton 3.6,
# whose interpreter fails with numpy 2.4, so the lock has an older one. It needs setuptools below 82, which the lock
# leaves open.
FLOOR := .venv-floor
FLOOR_BIN := $(FLOOR)/bin
FLOOR_PYTHON ?= $(firstword $(shell python3.12 -c 'import sys; print(sys.executable)' 2>/dev/null) \
	$(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python3.12) $(PYTHON))

# vLLM for the CPU. It requires the CPU build of torch: where pip does not find that, ENGINE_PIP_FLAGS may name torch's
# index of CPU builds with --extra-index-url.
ENGINE := .venv-engine
ENGINE_BIN := $(ENGINE)/bin
ENGINE_PIP := $(ENGINE_BIN)/python -m pip --disable-pip-version-check --quiet
ENGINE_PIP_FLAGS ?=

# Megatron-core, whose versions with an output processor need Python 3.12, and verl, whose Megatron engine calls it.
MEGATRON := .venv-megatron
MEGATRON_BIN := $(MEGATRON)/bin

DIST := .venv-dist
DOCS := .venv-docs

.PHONY: train test test-all test-ops test-floor test-floor-quick test-engine test-processors soak nightly \
	lint format results bench bench-quick wheel docs dist gpu-check clean

train: $(VENV)/built
	$(BIN)/python -m grpo_trainer train arithmetic --fresh

# One thread per worker, as there is a worker per core. Tests of several threads set their number. A file stays with one
# worker, so that what its tests share is made once.
test: $(VENV)/built
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile tests

test-all: $(VENV)/built
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --all tests

test-ops:
	$(PYTHON) -m pip install $(NEW_PIP)
	$(PYTHON) -m pip install -c $(LOCK) torch --group build numpy pytest hypothesis
	GRPO_KERNELS_BUILD=cpu $(PYTHON) -m pip install --no-build-isolation --no-deps -e .
	$(PYTHON) -m pytest tests/ops -k "cpu and not compile and not opcheck"

# Register budgets hold for the pinned Triton; with an older one spills are reported but allowed.
test-floor: $(VENV)/built $(FLOOR)/packages
	$(FLOOR_BIN)/python tools/aot_compile.py --allow-spills
	bash tools/check_wheels.sh

test-floor-quick: $(VENV)/built $(FLOOR)/packages
	$(FLOOR_BIN)/python tools/aot_compile.py --allow-spills --target sm_90
	bash tools/check_wheels.sh quick

# The extension is that of .venv, which has the same Python and torch; the kernels are for every Python.
test-engine: $(VENV)/built $(ENGINE)/packages $(MEGATRON)/packages
	PYTHONPATH="$(CURDIR)" OMP_NUM_THREADS=1 $(MEGATRON_BIN)/python -m pytest --confcutdir=tests/megatron tests/megatron
	PYTHONPATH="$(CURDIR):$(CURDIR)/python" OMP_NUM_THREADS=1 $(ENGINE_BIN)/python -m pytest --confcutdir=tests/engine tests/engine

# Sums of float32 have another order there, and on two threads, which tests have without workers.
SSE4 := ATEN_CPU_CAPABILITY=default MKL_ENABLE_INSTRUCTIONS=SSE4_2 ONEDNN_MAX_CPU_ISA=SSE41
AVX2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2
test-processors: $(VENV)/built
	@state=0; for processor in "$(SSE4)" "$(AVX2)"; do \
	  echo "$$processor"; \
	  env OMP_NUM_THREADS=1 $$processor $(BIN)/python -m pytest -n auto --dist loadfile \
	    --ignore tests/test_benchmarks.py tests || state=1; \
	done; \
	echo "two threads"; \
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest tests/ops tests/variants tests/integrations || state=1; \
	exit $$state

# SEED=N repeats the random choices of a run.
soak: $(VENV)/built
	PATH="$(CURDIR)/$(BIN):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile --nightly tests/nightly

# PARTS="bench results" runs those parts only.
PARTS ?=

# A part that fails stops no other; a table comes last. The results are those of one seed, all of them take hours.
# Benchmarks check that all results agree, without the largest heads. Limits that are not met, some of them for long
# (docs/performance.md), are listed; `make bench` alone fails for them.
NIGHTLY := test-all test-floor test-engine test-processors soak bench results
nightly: $(VENV)/built
	@table=; for part in $(or $(PARTS),$(NIGHTLY)); do \
	  began=$$(date +%s); state=ok; \
	  $(MAKE) $$part PARTS= SEEDS=$(or $(SEEDS),0) BENCH='--report-limits -rx -k "not 50304"' || state=failed; \
	  table="$$table$$(printf '%-15s %-6s %6d s' $$part $$state $$(($$(date +%s) - began)))\n"; \
	done; printf "\n$$table"; case "$$table" in *" failed "*) exit 1;; esac

lint: $(VENV)/built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP)

format: $(VENV)/built
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# A line per experiment, the longest first, for two processes of one thread, as small models use no more. No two lines
# have a folder of a run in common.
REPLIES := reply-base reply-sft reply-sft-polychromic reply-sft-conservative reply reply-grpo-polychromic \
	reply-polychromic
define EXPERIMENTS
$(REPLIES) --seeds $(or $(SEEDS),0 1 2) --folder runs/replies
gsm8k evaluation.samples=0 evaluation.every=0 --seeds $(or $(SEEDS),0 1 2)
dialogue-settings --seeds $(or $(SEEDS),0 1 2) --folder runs/settings
dialogue-algorithms --seeds $(or $(SEEDS),0 1 2)
strategies --seeds $(or $(SEEDS),4 5 6)
segments --seeds $(or $(SEEDS),0 1 2)
dialogue-encoder-decoder --seeds $(or $(SEEDS),0 1 2)
arithmetic --seeds $(or $(SEEDS),0 1 2)
endef
export EXPERIMENTS

# Each table is printed whole, when its experiment has ended.
results: $(VENV)/built
	echo "$$EXPERIMENTS" | OMP_NUM_THREADS=1 xargs -P 2 -L 1 sh -c 'out=$$($(BIN)/python tools/experiments.py "$$@") && echo "$$out"' _
	$(BIN)/python -m benchmarks.step --steps 9

bench: $(VENV)/built
	mkdir -p .benchmarks
	$(BIN)/python -m pytest benchmarks --save .benchmarks/bench.json $(BENCH)

# Ratios of one run on one thread hold on a shared machine. The best of three tries is compared: other load lowers a
# ratio once, a slower kernel every time.
bench-quick: $(VENV)/built
	$(BIN)/python -m pytest benchmarks --quick

wheel: $(VENV)/packages
	$(BIN)/python -m pip wheel --no-build-isolation --no-deps -w dist .

# Reads the sources without importing them, so it needs no torch. With --quiet, --strict would not see any warning.
docs: $(DOCS)/packages
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# What a release publishes, and the wheel without compiled kernels. TAG=vX.Y.Z must match the version.
TAG ?=
dist: $(DIST)/packages
	bash tools/build_wheels.sh $(TAG)

gpu-check:
	$(PYTHON) -m tools.gpu_check

clean:
	rm -rf $(VENV) $(FLOOR) $(ENGINE) $(MEGATRON) $(DIST) $(DOCS) build dist site *.egg-info grpo_kernels/*.so

# Everything except the compiled kernels. torch is installed first and alone, so that no other package chooses its version.
# The loader of the kernels hub, beside which transformers behaves differently, and Liger are in folders for their tests.
$(VENV)/packages: $(LOCK) pyproject.toml
	@echo "installing torch, TRL, verl and the trainer's packages into $(VENV): minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(NEW_PIP)
	$(PIP) install -c $(LOCK) $(TORCH) --group build
	GRPO_KERNELS_BUILD=none $(PIP) install -c $(LOCK) --no-build-isolation --group dev \
		-e '.[trl,verl,trainer,lora,similarity,text,judge]'
	$(PIP) install -c $(LOCK) --no-deps --upgrade --target $(VENV)/hub kernels tomlkit
	$(PIP) install -c $(LOCK) --no-deps --upgrade --target $(VENV)/liger liger-kernel
	touch $@

$(VENV)/built: $(VENV)/packages $(SOURCES)
	@echo "compiling the CPU kernels: minutes"
	PATH="$(CURDIR)/$(BIN):$$PATH" $(PIP) install --no-build-isolation --no-deps -e .
	touch $@

# The last three come along with vLLM, as CUDA builds that do not load beside this torch, and transformers imports them.
$(ENGINE)/packages: $(LOCK) pyproject.toml
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE_PIP) install $(NEW_PIP)
	$(ENGINE_PIP) install -c $(LOCK) 'setuptools>=77'
	GRPO_KERNELS_BUILD=none $(ENGINE_PIP) install $(ENGINE_PIP_FLAGS) -c $(LOCK) --no-build-isolation --group engine \
		-e '.[trl,verl,trainer,lora,similarity,text,ray]'
	DS_BUILD_OPS=0 $(ENGINE_PIP) install -c $(LOCK) --no-build-isolation deepspeed
	$(ENGINE_PIP) uninstall --yes torchvision torchaudio torchcodec
	touch $@

$(MEGATRON)/packages: $(LOCK) pyproject.toml
	$(FLOOR_PYTHON) -m venv $(MEGATRON)
	$(MEGATRON_BIN)/python -m pip install --quiet $(NEW_PIP)
	$(MEGATRON_BIN)/python -m pip install --quiet -c $(LOCK) torch==2.13.0 triton==3.7.1 --group megatron
	touch $@

$(FLOOR)/packages: $(LOCK) pyproject.toml
	$(FLOOR_PYTHON) -m venv $(FLOOR)
	$(FLOOR_BIN)/python -m pip install --quiet $(NEW_PIP)
	$(FLOOR_BIN)/python -m pip install --quiet -c $(LOCK) torch==2.11.0 triton==3.6.0 --group build numpy pytest \
		pytest-xdist hypothesis
	touch $@

# What builds and checks a release.
$(DIST)/packages: $(LOCK) pyproject.toml
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet $(NEW_PIP)
	$(DIST)/bin/python -m pip install --quiet -c $(LOCK) torch==2.13.0 --group build --group dist
	touch $@

$(DOCS)/packages: $(LOCK) pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet $(NEW_PIP)
	$(DOCS)/bin/python -m pip install --quiet -c $(LOCK) --group docs
	touch $@
