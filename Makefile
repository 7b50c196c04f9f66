# `make demo` and `make test` set up everything they need in .venv and run; a second call starts at once.
#
# Needed beforehand: Python 3.11 or newer with its headers and the venv module, and a C++20 compiler. Both are checked.
# Another interpreter or compiler: make PYTHON=python3.13 CXX=clang++ test

PYTHON ?= python3
ifeq ($(origin CXX),default)
CXX := $(firstword $(foreach name,g++ clang++,$(if $(shell command -v $(name)),$(name))) g++)
endif

VENV := .venv
BIN := $(VENV)/bin
TYPED := build/typed/tierstream
SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.h)
BUILD_TOOLS := scikit-build-core nanobind cmake ninja
# Modules are compiled when they are first imported: most never are, and pip would take a minute for all. What is
# compiled is kept, also where the environment says otherwise: dozens of processes import the same.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := PIP_DISABLE_PIP_VERSION_CHECK=1 CXX=$(CXX) $(BIN)/pip install --quiet --no-compile --constraint constraints.txt

.PHONY: demo test pytest lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	$(BIN)/python examples/demo.py

# mypy takes one core for a minute: the others need not wait for it.
test: $(VENV)/installed-test $(TYPED)
	$(MAKE) --jobs=2 lint pytest

# Half as many tests again at once as there are cores, since a third of the time they wait for delays that they
# put into copies; each worker takes about 1 GB of memory.
pytest: $(VENV)/installed-test
	$(BIN)/python -m pytest --numprocesses=$(shell expr $$(nproc) \* 3 / 2) --maxprocesses=8 --dist=worksteal

lint: $(VENV)/installed-test $(TYPED)
	$(BIN)/ruff check .
	MYPYPATH=build/typed $(BIN)/mypy -p tierstream

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# The package is installed in place: edits of Python files need nothing, edits of csrc/ build again.
$(VENV)/installed: $(SOURCES) | $(VENV)/ready
	@echo "Installing tierstream and what it needs in $(VENV); the first time takes some minutes."
	$(PIP_INSTALL) --no-build-isolation --editable .
	@touch $@

$(VENV)/installed-test: $(SOURCES) kvikio-for-tests.txt | $(VENV)/ready
	@echo "Installing tierstream, what it needs and the test tools in $(VENV); the first time takes some minutes."
	$(PIP_INSTALL) --no-build-isolation --editable '.[test]'
	$(PIP_INSTALL) --no-deps --requirement kvikio-for-tests.txt
	@touch $(VENV)/installed $@

# A stamp, so that a venv that was left half made does not count.
$(VENV)/ready:
	@$(call need,$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3$(comma) 11))', \
		$(PYTHON) must be Python 3.11 or newer,python3)
	@$(call need,$(PYTHON) -c 'import ensurepip$(comma) venv', \
		the venv module of $(PYTHON) is missing,python3-venv)
	@$(call need,$(PYTHON) -c '$(has_headers)', \
		the C headers of $(PYTHON) are missing,python3-dev)
	@$(call need,echo 'int main() { return __cplusplus < 202002L; }' | $(CXX) -std=c++20 -x c++ -fsyntax-only -, \
		$(CXX) must be a C++20 compiler (g++ 11 or clang++ 14 or newer),g++)
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP_INSTALL) $(BUILD_TOOLS)
	@touch $@

comma := ,
has_headers := import os$(comma) sys$(comma) sysconfig; \
	sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include")$(comma) "Python.h")))

# $(call need,command,what is wrong when it fails,Debian package that helps)
define need
{ $(1); } >/dev/null 2>&1 || { echo "make: $(strip $(2)). On Debian or Ubuntu: apt-get install $(strip $(3))" >&2; exit 1; }
endef

# mypy must see the names that users import; an editable install shows them only to a running interpreter.
$(TYPED): $(wildcard package/tierstream/*)
	@mkdir -p $@
	@ln -sfn $(foreach file,$(notdir $^),../../../package/tierstream/$(file)) \
		$(foreach folder,io tiered engine tools,../../../$(folder)) $@/
	@touch $@
