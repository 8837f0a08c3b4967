# Two commands on a fresh machine: `make train` and `make test`. Both set up .venv first, if anything changed.
#
#   make setup         .venv with the pinned packages (PYTHON=python3.12 chooses the interpreter)
#   make train         pretrain a small model on built-in text; ARGS="--seed 1" adds arguments
#   make test          the quick tests, about four minutes on two idle cores: every part, with real
#                      ranks on gloo;
#                      TEST_PROCESSES=1 runs one after the other, PYTEST_ARGS="-k name" chooses
#   make test-all      every test: the quick ones, then those marked slow, which take about half an hour more
#   make quick         for the inner loop, half a minute: lint, types, and the tests that start no
#                      other process and load no heavy library; the first time mypy takes
#                      a minute more
#   make lint          ruff, mypy and the import contracts
#   make release-check wheel and sdist, each in an empty environment: trains, converts, generates;
#                      then 90 combinations of settings, exports with the oldest and the newest
#                      transformers, and its own tests; about 45 minutes
#   make docs          the documentation site into build/site/; a warning or a dead link is an error
#   make figures       docs/results.md: its numbers and pictures from the recorded studies in results/
#   make constraints   write constraints.txt again from the newest versions that pyproject.toml allows
#   make clean         remove .venv and caches; data/, runs/ and hf/ stay

SHELL := /bin/bash
PYTHON ?= python3
ARGS ?=
PYTEST_ARGS ?=
# Side by side, each with its file's fixtures. The quick tests wait for other processes part of the time; the
# slow ones rarely do, and have deadlines.
test quick: TEST_PROCESSES ?= 3
test-slow: TEST_PROCESSES ?= 2
PYTEST = python -m pytest -n $(TEST_PROCESSES) --dist loadfile --durations 40 $(PYTEST_ARGS)

VENV := .venv
ACTIVATE := . $(VENV)/bin/activate
# The stamp's name holds a checksum of what was installed and where: an unchanged file with a new date (a
# fresh checkout) installs nothing, and a moved or copied folder does not use another folder's environment.
STAMP := $(VENV)/.setup-$(shell { cat pyproject.toml constraints.txt; pwd; } | cksum | cut -d ' ' -f 1)

.PHONY: setup train quick test test-all test-slow lint docs release-check figures constraints clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

$(STAMP):
	@command -v $(PYTHON) >/dev/null || { \
		echo "error: no $(PYTHON); install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python3"; \
		exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "error: $(PYTHON) is $$($(PYTHON) -V 2>&1); 3.11 or newer is needed: make setup PYTHON=python3.11"; \
		exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "error: $(PYTHON) cannot create environments; on Debian and Ubuntu: apt-get install python3-venv"; \
		exit 2; }
	@command -v g++ >/dev/null || { \
		echo "error: no g++; torch.compile and DeepSpeed's optimizers need it: apt-get install g++"; exit 2; }
	@test -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || \
		echo "note: the Python headers are missing, so torch.compile and CPU offload will not work:" \
			"apt-get install python3-dev"
	@[ ! -L $(VENV) ] || rm $(VENV) # a link to another folder's environment, which --clear would empty
	@grep -qsF "$(CURDIR)/$(VENV)" $(VENV)/bin/activate && \
		$(VENV)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "creating $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "installing the packages pinned in constraints.txt (the first time takes minutes)"
	PYTHONWARNINGS=ignore $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
		--editable '.[dev]' --constraint constraints.txt
	@rm -f $(VENV)/.setup-* && touch $@

# The batch of the default run is shared evenly by 1, 2 or 4 ranks: of 6 GPUs (or NUMA nodes), 4 take part.
# Given a number, DeepSpeed would take the machine's first GPUs, whatever CUDA_VISIBLE_DEVICES says.
define DEVICES
import os
from deepspeed.accelerator import get_accelerator
accelerator, visible = get_accelerator(), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
ranks = 1 << min(accelerator.device_count(), 4).bit_length() - 1
named = accelerator.device_name() == "cuda" and visible[0]
print(f"--include localhost:{','.join(visible[:ranks])}" if named else f"--num_accelerators {ranks}")
endef
export DEVICES

train: setup
	$(ACTIVATE) && deepspeed --log_level critical $$(python -c "$$DEVICES" 2>/dev/null | tail -n 1) pretrain/main.py \
		--ds_config ds_configs/zero2.json $(ARGS)

test: setup
	$(ACTIVATE) && $(PYTEST) -m "not slow"

# One after the other also under make -j: both want all cores.
test-all: test
	$(MAKE) test-slow

# pytest ends with 5 when it finds no test at all, which is no failure while nothing is marked slow.
test-slow: setup
	$(ACTIVATE) && $(PYTEST) -m slow || test $$? -eq 5

quick: lint
	$(ACTIVATE) && python -m pytest -q --quick -m "not slow" -n $(TEST_PROCESSES) --dist loadfile $(PYTEST_ARGS)

lint: setup
	$(ACTIVATE) && ruff check . && ruff format --check . && mypy && lint-imports

figures: setup
	$(ACTIVATE) && python docs/results.py

docs: setup
	$(ACTIVATE) && python -m sphinx -W --keep-going -q -c docs . build/site
	@echo "open build/site/index.html"

release-check:
	PYTHON=$(PYTHON) .ci/release-check

# In a separate environment, so that only what the project asks for is listed. Left out: the project
# itself, torch's build suffix (+cpu, +cu130), and the CUDA libraries, which torch pins and only some machines
# have.
constraints:
	$(PYTHON) -m venv --clear build/constraints
	build/constraints/bin/python -m pip install --quiet --editable '.[dev]'
	{ sed -n '/^#/p' constraints.txt; \
		build/constraints/bin/python -m pip freeze --exclude-editable | \
		sed 's/^\(torch==[^+]*\)+.*/\1/' | \
		grep -Ev '^(nvidia-|cuda-|triton|pip==|setuptools==)'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
