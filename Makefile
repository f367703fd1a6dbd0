# `make demo` and `make test` set up everything they need by themselves.
#   PYTHON=...  the Python to use; if it has torch already (a GPU machine), that torch is used
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
JOBS ?= $(shell nproc)
# `make build` compiles for one GPU only, the one that is here, else Hopper; `make wheel` for all.
CUDA_ARCHS ?= $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
  | sed -n '1{s/[.]//;s/^90$$/90a/;p}'),90a)
CXX_SOURCES = $(shell git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'csrc/*.hip')

.PHONY: demo test lint format bench wheel build clean

demo: build
	$(BIN)/python -m mla_fp8 demo

test: build
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(BIN)/mypy
	$(BIN)/python ci/check_tree.py

format: $(STAMP)
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

bench: build
	$(BIN)/python -m mla_fp8 bench --out benchmarks/results

wheel: $(STAMP)
	$(BIN)/pip wheel --no-build-isolation --no-deps -w dist .

# ninja rebuilds only what changed, so this runs every time.
build: $(STAMP)
	MLA_FP8_TESTS=1 MLA_FP8_BUILD_DIR=build/cmake MLA_FP8_CUDA_ARCHS="$(CUDA_ARCHS)" MAX_JOBS=$(JOBS) \
	  PATH="$(CURDIR)/$(BIN):$$PATH" \
	  $(BIN)/python setup.py -q build_ext --inplace

$(STAMP): ci/constraints.txt ci/setup_venv.sh
	PYTHON="$(PYTHON)" sh ci/setup_venv.sh $(VENV)
	touch $@

clean:
	rm -rf build dist $(VENV) python/mla_fp8/lib
