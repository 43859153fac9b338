# make train       set up .venv (once), train the embedded default: 3 minutes on two cores
# make test        set up .venv (once), run the tests that take seconds each
# make test-all    all tests, those of minutes included
# make reproduce   a reduced grid of the paper's experiments and its figures: 23 minutes
# make bench       the benchmark of experiments/bench.py
# make gpu-check   mismatch, memory and speed on this machine's GPU: minutes; nothing on a CPU
# make lint        ruff

PYTHON ?= python3
REQUIREMENTS := $(if $(shell nvidia-smi -L 2>/dev/null),requirements.txt,requirements-cpu.txt)
BIN := .venv/bin

.PHONY: train test test-all reproduce bench gpu-check lint
train: .venv/installed
	$(BIN)/torchrun --standalone train.py

test: .venv/installed
	$(BIN)/python -m pytest -q -m "not slow"

test-all: .venv/installed
	$(BIN)/python -m pytest -q

reproduce: .venv/installed
	$(BIN)/python experiments/mismatch.py --grid reduced --folder runs/reproduce
	$(BIN)/python experiments/plot.py runs/reproduce

bench: .venv/installed
	$(BIN)/python experiments/bench.py

gpu-check: .venv/installed
	$(BIN)/torchrun --standalone experiments/gpu_check.py --out runs/gpu-check.json

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# The CPU build of torch is not in every registry under its name: uv knows where its makers keep it.
.venv/installed: $(REQUIREMENTS)
	$(PYTHON) -m venv .venv
ifeq ($(REQUIREMENTS),requirements-cpu.txt)
	$(BIN)/pip install -q torch==2.13.0+cpu || { $(BIN)/pip install -q uv && \
	    $(BIN)/uv pip install -q --python $(BIN)/python --torch-backend cpu torch==2.13.0; }
	$(BIN)/pip install -q -r requirements-cpu.txt
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
else
	$(BIN)/pip install -q -r requirements.txt
endif
	touch $@
