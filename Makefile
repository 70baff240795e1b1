# Two commands on a fresh clone, with only Python (>= 3.11) and make there:
#   make demo    install into .venv and run the main job
#   make test    install into .venv and run the checks: format, types and tests, without the slow ones
#   make test-all   the same, and `make test-slow`: slow tests, and those in which several processes train together
#   make test-library   the library's tests, in an environment without the application
#   make soak    the tests that take minutes, 2,000 random training programs captured and eager, and ranks killed at
#                random points: of a run 30 times, sharded 35 times
#   make docs    build the docs site into build/docs, offline, with warnings as errors
#   make integrations   timm, nnU-Net and MONAI in an environment of their own, and the tests with them
#   make rules   write docs/rules from the rules of halfstep-check
#   make wheel   build the three distributions, and use them with Python 3.11, 3.12 and 3.13;
#                TORCH=2.10.0 installs that torch instead of the pinned one
#   make torch TORCH=2.15.0   run the core's tests with that torch and its triton, in a temporary environment of 5 GB,
#                and store the result; ENVS=DIR keeps the environment there
#   make check-hook   try the pre-commit hook of halfstep-check, as committed, with pre-commit itself
#   make trackers   install wandb and MLflow into .venv-trackers (over a gigabyte) and test log.track with them
#   make demos   train every workload's demo and assert what it learned (minutes each)
# On an x86 Linux machine the pinned torch is the CUDA build (gigabytes); on others it is small.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
QUICK := 'not slow and not ranks'

.PHONY: demo demos docs integrations soak torch trackers test test-all test-slow test-library lint check check-hook rules format clean wheel

demo: $(STAMP)
	$(BIN)/halfstep train unet

demos: $(STAMP)
	set -e; for demo in demos/*.py; do echo "== $$demo"; $(BIN)/python "$$demo"; done

soak: $(STAMP)
	$(BIN)/python -m pytest -q -m soak
	PYTHONPATH=tests/support $(BIN)/python tests/soak_ranks.py
	PYTHONPATH=tests/support $(BIN)/python tests/soak_shards.py

trackers:
	test -x .venv-trackers/bin/python || $(PYTHON) -m venv .venv-trackers
	.venv-trackers/bin/python -m pip install --quiet --disable-pip-version-check -c packages/halfstep-train/tests/trackers/constraints.txt -e 'packages/halfstep[track,trackers]' -e packages/halfstep-train pytest
	.venv-trackers/bin/python -c 'import wandb, mlflow, tensorboard' # the tests would be skipped without them
	.venv-trackers/bin/python -m pytest -q packages/halfstep-train/tests/trackers packages/halfstep-train/tests/report/test_listeners.py

# Dozens of processes import halfstep: its bytecode is kept, whatever the shell says.
test: export PYTHONDONTWRITEBYTECODE =
test: lint
	$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest -n auto --dist worksteal -q -m $(QUICK); tests=$$?; wait $$types && exit $$tests

test-all: test test-slow

test-slow: export PYTHONDONTWRITEBYTECODE =
test-slow: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal -q -m 'slow or ranks'

# The library must not need the application: here there is none.
test-library:
	test -x .venv-library/bin/python || $(PYTHON) -m venv .venv-library
	.venv-library/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e 'packages/halfstep[test]'
	.venv-library/bin/python -m pytest -n auto --dist worksteal -q packages/halfstep/tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: lint
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going -b html -d build/doctrees docs build/docs
	@echo "open build/docs/index.html"

# timm, nnU-Net and MONAI bring a hundred packages: they get an environment of their own.
INTEGRATIONS ?= .venv-integrations
HOSTS := timm nnunetv2 monai pytorch-ignite
integrations:
	test -x $(INTEGRATIONS)/bin/python || $(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -c packages/halfstep/tests/integrations/constraints.txt -e packages/halfstep pytest $(HOSTS)
	$(INTEGRATIONS)/bin/python -m pytest -q packages/halfstep/tests/integrations/test_monai.py packages/halfstep/tests/integrations/test_nnunet.py packages/halfstep/tests/integrations/test_timm.py

rules: $(STAMP)
	$(BIN)/python packages/halfstep-check/rule_pages.py docs/rules

wheel: $(STAMP)
	rm -rf dist
	$(BIN)/python tests/try_wheels.py dist $(if $(TORCH),--torch $(TORCH))

torch:
	$(if $(TORCH),,$(error name a version, as in make torch TORCH=2.15.0))
	$(PYTHON) benchmarks/torch_versions.py $(TORCH) $(if $(ENVS),--envs $(ENVS))

check-hook:
	packages/halfstep-check/tests/try_hook.sh

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): $(wildcard packages/*/pyproject.toml) constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("halfstep needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	@echo "halfstep: installing its packages into .venv, once; this takes minutes, and gigabytes on x86 Linux"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -c constraints.txt -e 'packages/halfstep[dev,track]' -e packages/halfstep-train -e packages/halfstep-check
	@echo "halfstep: compiling the packages, so that the first command starts fast"
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true # pip would do it on one core: over a minute
	touch $(STAMP)

clean:
	rm -rf .venv .venv-library .venv-trackers .mypy_cache .pytest_cache .ruff_cache
