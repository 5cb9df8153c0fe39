# Everything runs in a virtual environment of its own; versions are pinned in constraints.txt.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= runs/demo
PIP := -m pip install --progress-bar off --constraint constraints.txt
LIBRARY := packages/nystrom
LABORATORY := packages/nystrom-lab
PAPERS := packages/nystrom-papers
# Writes what groups of pyproject.toml ask for, a line each.
GROUPS := import sys, tomllib; groups = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]; \
  print(*(each for name in sys.argv[1:] for each in groups[name]), sep="\n")
# Option of uv, which takes the oldest torch without CUDA; empty for PyPI's.
FLOORS ?= --torch-backend cpu

.PHONY: help demo test whole slow shapes bare floors lint types layers readme tables docs check gpu clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "nystrom needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.cli: pyproject.toml $(LIBRARY)/pyproject.toml $(LABORATORY)/pyproject.toml $(PAPERS)/pyproject.toml constraints.txt | $(VENV)/.made
	@echo "Installing PyTorch and the commands into $(VENV). This takes minutes, and about 5 GB with PyTorch's CUDA build."
	@echo "Without a GPU, stop here and choose the CPU build, which is much smaller:"
	@echo "  PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make $(MAKECMDGOALS)"
	$(BIN)/python $(PIP) torch
	$(BIN)/python $(PIP) --editable '$(LIBRARY)[real]' --editable $(LABORATORY) --editable $(PAPERS)
	@touch $@

$(VENV)/.dev: $(VENV)/.cli
	@echo "Installing what the tests and checks need into $(VENV)."
	$(PYTHON) -c '$(GROUPS)' docs test dev > $(VENV)/needs.txt
	$(BIN)/python $(PIP) --editable '$(LIBRARY)[gpu,onnx,real]' --editable '$(LABORATORY)[cluster,tensorboard]' --editable '$(PAPERS)[peers]' \
	  --requirement $(VENV)/needs.txt
	@touch $@

demo: $(VENV)/.cli  ## install; read and search long texts with a pretrained encoder (three minutes)
	$(BIN)/python examples/demo.py --to $(DEMO)

test: $(VENV)/.dev  ## the fast tests
	$(BIN)/python -m pytest -n auto

whole: $(VENV)/.dev  ## the fast tests, and those that take seconds each
	$(BIN)/python -m pytest -n auto -m 'not slow and not gpu and not readme'

slow: $(VENV)/.dev  ## the tests that take minutes
	$(BIN)/python -m pytest -n auto -m 'slow and not gpu'

shapes: $(VENV)/.dev  ## the mathematics again, each shape and dtype in a signature checked at run time
	$(BIN)/python -m pytest -n auto --hypothesis-profile few --jaxtyping-packages=nystrom,beartype.beartype -m 'not refuses and not slow and not gpu' \
	  -k 'not compile and not export and not one_graph and not triton and not torch_jit' `# torch does not trace through the checker, nor does Triton` \
	  $(addprefix $(LIBRARY)/tests/,attention linalg parity test_kernels.py test_landmarks.py)

tables: $(VENV)/.dev  ## write the tables of the pages, and the first page's figure, from the rows in results/
	$(BIN)/python tools/write_tables.py
	$(BIN)/python tools/first_page.py --figure docs/first-page.png

$(VENV)-docs/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-docs
	@echo "Installing what the site needs into $(VENV)-docs, without PyTorch."
	$(PYTHON) -c '$(GROUPS)' docs > $(VENV)-docs/needs.txt
	$(VENV)-docs/bin/python $(PIP) --requirement $(VENV)-docs/needs.txt
	@touch $@

docs: $(VENV)-docs/.made  ## build the site into site/, in an environment of its own; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict

bare: | $(VENV)/.made  ## all wheels, and the library's tests in an environment without the laboratory
	rm -rf $(VENV)-bare packages/*/build `# what is left of an earlier build would enter a wheel`
	$(PYTHON) -m venv $(VENV)-bare
	$(VENV)-bare/bin/python -m pip wheel --no-deps --wheel-dir $(VENV)-bare/wheels ./$(LIBRARY) ./$(LABORATORY) ./$(PAPERS)
	$(PYTHON) tools/check_wheels.py $(VENV)-bare/wheels/*.whl
	@echo "Installing PyTorch and the library's wheel alone into $(VENV)-bare, which takes minutes."
	$(VENV)-bare/bin/python $(PIP) torch
	$(VENV)-bare/bin/python $(PIP) $(VENV)-bare/wheels/nystrom-[0-9]*.whl
	cd $(VENV)-bare && bin/python ../$(LIBRARY)/tests/bare.py
	$(PYTHON) -c '$(GROUPS)' test > $(VENV)-bare/needs.txt
	$(VENV)-bare/bin/python $(PIP) "$$(echo $(VENV)-bare/wheels/nystrom-[0-9]*.whl)[gpu,onnx]" --requirement $(VENV)-bare/needs.txt
	$(VENV)-bare/bin/python -m pytest -n auto --hypothesis-profile few $(LIBRARY)/tests \
	  --ignore $(LIBRARY)/tests/attention/test_every_method.py `# what is installed does not change the laws; make test runs them`
	@echo "The command without nystrom-papers."
	$(VENV)-bare/bin/python $(PIP) --no-deps $(VENV)-bare/wheels/nystrom_lab-*.whl
	$(VENV)-bare/bin/nystrom --help
	$(VENV)-bare/bin/nystrom reproduce --list 2>&1 | grep 'needs nystrom-papers'
	rm -rf $(VENV)-bare

floors: | $(VENV)/.made  ## the oldest allowed version of each dependency, in an environment with them
	rm -rf $(VENV)-floors
	$(PYTHON) -m venv $(VENV)-floors
	$(VENV)-floors/bin/python -m pip install --progress-bar off uv
	$(VENV)-floors/bin/uv pip install --python $(VENV)-floors --resolution lowest-direct $(FLOORS) ./$(LIBRARY) ./$(LABORATORY) ./$(PAPERS)
	$(VENV)-floors/bin/uv pip install --python $(VENV)-floors pytest pytest-timeout pytest-xdist hypothesis
	$(VENV)-floors/bin/python -m pytest -n auto -o filterwarnings= `# old versions warn of newer ones` \
	  $(LIBRARY)/tests/models/files $(addprefix $(LABORATORY)/tests/,cli report training/test_faults.py) $(PAPERS)/tests/report
	rm -rf $(VENV)-floors

lint: $(VENV)/.dev  ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev  ## static types
	$(BIN)/pyright

layers: $(VENV)/.dev  ## which package may import which
	$(BIN)/lint-imports

readme: $(VENV)/.dev  ## the code blocks of README and docs, and the examples
	$(BIN)/python -m pytest -n auto --dist worksteal -m readme

gpu:  ## on a machine with a GPU: tests, models, near_far, then tables, 13 minutes a call; goes on where it was
	$(PYTHON) tools/measure_gpu.py --to runs/gpu

check: lint types layers docs whole readme shapes bare  ## all that a change must pass

clean:  ## remove environments and caches, not runs or data
	rm -rf $(VENV) $(VENV)-bare $(VENV)-floors $(VENV)-docs .pytest_cache .ruff_cache .hypothesis .import_linter_cache site packages/*/build packages/*/src/*.egg-info
