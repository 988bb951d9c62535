# One environment, .venv, made on demand. Nothing but make and a Python is needed: every dependency comes as a wheel.
VENV    := .venv
STAMP   := $(VENV)/.installed
PY      := $(VENV)/bin/python
ARGS    ?=
SEEDS   ?= 100
# Tried by running it: a version manager puts names on PATH that only print an error.
SUITABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON  ?= $(firstword $(foreach name,python3.13 python3.12 python3.11 python3,\
             $(shell $(name) -c '$(SUITABLE)' >/dev/null 2>&1 && echo $(name))))
PACKAGES := $(addprefix -p tiebreak.,kernels backends cases reports matrix programs laboratory defects)

# Also for the environment that pip builds the package in: the first name up to pip 25.2, the second from 25.3 on.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv matrix platforms training test suite alarms power bounds docs gallery lint typecheck bench bench-gpu clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "  ARGS='...' goes to pytest; PYTHON=... picks the Python to make .venv with"

venv: $(STAMP)  ## .venv with the pinned dependencies

# The stamp comes last, so a failed install leaves none and the next call starts over.
$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	  python='$(PYTHON)'; \
	  "$${python:-false}" -c '$(SUITABLE)' >/dev/null 2>&1 || { \
	    echo "tiebreak needs Python 3.11 or newer with its venv module; name one: make venv PYTHON=/path/to/python3" >&2; \
	    exit 1; }; \
	  echo "$(VENV): $$("$$python" --version)"; \
	  "$$python" -m venv --clear $(VENV); }
	$(PY) -m pip install --quiet -c constraints.txt -e '.[test]'
	@touch $@

matrix: $(STAMP)  ## the matrix on this platform
	$(PY) -m pytest -n auto tests/matrix $(ARGS)

platforms: $(STAMP)  ## the matrix once per instruction-set level of this CPU, then the comparison
	$(PY) -m tiebreak.programs.levels run -- -n auto tests/matrix $(ARGS)

# Every seed runs, whatever the seeds before it did; the table shows what fell.
training: $(STAMP)  ## the short training runs at three seeds: table and figure
	@status=0; for seed in 1 2 3; do \
	  $(PY) -m pytest -n auto tests/matrix/test_cells.py --cases 'train_*' --seed $$seed --save training-$$seed $(ARGS) \
	    || status=$$?; \
	done; \
	$(VENV)/bin/tiebreak show out/training-1.json out/training-2.json out/training-3.json \
	  --figure out/training.svg || status=$$?; \
	exit $$status

test: lint typecheck suite  ## lint, types and the whole test suite

# A wheel of 290 MB, which the matrix on a CPU does without, and which there is not for every machine.
TRITON  := $(VENV)/.triton
$(TRITON): $(STAMP)
	@$(PY) -m pip install --quiet -c constraints.txt -e '.[triton]' && touch $@ \
	  || echo "triton can't be installed: its interpreter and the audit are skipped, for that reason" >&2

# Wheels of their own, which the suite does without where they can't be had: the site's test is skipped there.
SITE    := $(VENV)/.site
$(SITE): $(STAMP)
	@$(PY) -m pip install --quiet -c constraints.txt -e '.[docs]' && touch $@ \
	  || echo "zensical can't be installed: the documentation's site is not built, for that reason" >&2

docs: $(SITE)  ## the documentation as a site: out/docs/site/index.html
	$(PY) -m tiebreak.programs.pages.site $(ARGS)

gallery: $(STAMP)  ## the page of every machine's records: out/gallery/index.html
	$(VENV)/bin/tiebreak page $(wildcard reports/platforms/*/*.json.gz) -o out/gallery

# The emulation's committed records gate this repository itself; --across: they are the same on every platform.
suite: $(TRITON) $(SITE)  ## the whole test suite alone, held against the committed baseline
	$(PY) -m pytest -n auto --baseline reports/baselines/emulation.json --across $(ARGS)

alarms: $(STAMP)  ## false alarms of the default matrix over SEEDS seeds; resumes
	$(PY) -m tiebreak.programs.alarms --seeds $(SEEDS) $(ARGS)

power: $(STAMP)  ## which planted defects the suite catches; resumes
	$(PY) -m tiebreak.defects.power $(ARGS)

bounds: $(STAMP)  ## bounds of the training runs from SEEDS seeds; resumes
	$(PY) -m tiebreak.programs.spread --seeds $(SEEDS) --write $(ARGS)

lint: $(STAMP)  ## ruff: rules and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

# tests/matrix, programs, laboratory and defects are left out of the second run: the first has them, as they are imported.
typecheck: $(STAMP)  ## mypy --strict
	$(PY) -m mypy $(PACKAGES)
	$(PY) -m mypy conftest.py tests --exclude '^tests/(matrix|programs|laboratory|defects)/'

bench: $(STAMP)  ## benchmarks
	$(PY) -m pytest tests/bench -o python_files='bench_*.py' --benchmark-only \
	  --benchmark-columns=min,median,max $(ARGS)

bench-gpu: $(STAMP)  ## attention on a GPU, side by side with PyTorch's
	$(PY) -m pytest tests/bench/gpu -o python_files='bench_*.py' $(ARGS)

clean:  ## remove .venv, build files and caches (records in out/ stay)
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
