# Every target makes what it needs in .venv; `make PYTHON=python3.12 test` takes another Python.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Test processes; tests mostly wait for the compiler, whose work those of one file share. Files stay
# whole until a process has nothing left and takes half of what another one has.
WORKERS ?= -n logical --maxprocesses 8 --dist worksteal
TESTS = tests
# Bounds beyond those of pyproject.toml, as in PINS='transformers<5'.
PINS =
# What native-test builds and runs; see host_kernels/tests/run.sh.
NATIVE_BUILDS = plain asan tsan valgrind fuzz
NATIVE := $(wildcard host_kernels/src/*.cc host_kernels/src/*.h)
RECIPE := pyproject.toml CMakeLists.txt $(NATIVE)
CXX_FILES := $(NATIVE) $(wildcard host_kernels/tests/*.cc host_kernels/tests/*.h \
  host_kernels/tests/fuzz/*.cc host_kernels/tests/fuzz/*.h)

# The packages of an optional dependency group, as pyproject.toml lists them.
extra = $$($(BIN)/python -c 'import sys, tomllib; print(*tomllib.load(open("pyproject.toml", \
  "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")' $(1) >$(VENV)/$(1).txt && \
  echo $(VENV)/$(1).txt)

.PHONY: demo test slow lint native-test oracle transformers4 clean compiler
.DELETE_ON_ERROR:

demo: $(VENV)/.base
	$(BIN)/herald demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not oracle and not gpu and not slow" $(WORKERS) $(TESTS)

slow: $(VENV)/.oracle
	$(BIN)/python -m pytest -m slow $(WORKERS) tests

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)

native-test: $(VENV)/.native compiler
	PATH="$(abspath $(BIN)):$$PATH" sh host_kernels/tests/run.sh $(NATIVE_BUILDS)

oracle: $(VENV)/.oracle
	$(BIN)/python -m pytest -m "oracle and not slow" $(WORKERS) tests

# What reads tokenizers, with the other major version of transformers, in a venv of its own.
transformers4:
	$(MAKE) test VENV=$(VENV)-transformers4 PINS='transformers>=4.57,<5' \
	  TESTS="$(wildcard tests/test_tokenizer*.py tests/test_chat*.py)"

clean:
	rm -rf $(VENV) $(VENV)-transformers4 build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

compiler:
	@echo 'static_assert(__cplusplus >= 201703L, "");' | \
	  $${CXX:-c++} -std=c++17 -fsyntax-only -x c++ - 2>/dev/null || { \
	  echo "error: no C++17 compiler ($${CXX:-c++}): install g++ or clang++, or set CXX" >&2; exit 2; }

$(VENV)/.made:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: $(PYTHON) is not Python 3.11 or newer: name one, as in make PYTHON=python3.12" >&2; \
	  exit 2; }
	"$(PYTHON)" -m venv $(VENV)
	@touch $@

# Installed again only when the recipe or the native sources have changed.
$(VENV)/.base: $(VENV)/.made $(RECIPE) | compiler
	$(BIN)/python -m pip install --quiet --editable . $(if $(PINS),'$(PINS)')
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(BIN)/python -m pip install --quiet -r $(call extra,test)
	@touch $@

$(VENV)/.lint: $(VENV)/.test
	$(BIN)/python -m pip install --quiet -r $(call extra,lint)
	@touch $@

$(VENV)/.native: $(VENV)/.made
	$(BIN)/python -m pip install --quiet cmake ninja
	@touch $@

$(VENV)/.oracle: $(VENV)/.test
	$(BIN)/python -m pip install --quiet -r $(call extra,oracle)
	@touch $@
