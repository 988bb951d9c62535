# One environment, .venv, made on demand. Nothing but make and a Python is needed: every dependency comes as a wheel.
VENV    := .venv
STAMP   := $(VENV)/.installed
FULL    := $(VENV)/.complete
PY      := $(VENV)/bin/python
LOG     := $(VENV)/pip.log
ALL     := '.[test,triton,docs]'
ARGS    ?=
SEEDS   ?= 100
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
# Tried by running it: a version manager puts names on PATH that only print an error.
SUITABLE := import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))
PYTHON  ?= $(firstword $(foreach name,python3.13 python3.12 python3.11 python3,\
             $(shell $(name) -c '$(SUITABLE)' >/dev/null 2>&1 && echo $(name))))

# Also for the environment that pip builds the package in: the first name up to pip 25.2, the second from 25.3 on.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# pip compiles every file of every package, one after another; the first import compiles what is used, and keeps it, also
# where the shell says otherwise: each of a hundred processes that the tests start would compile it again.
unexport PYTHONDONTWRITEBYTECODE
# What pip says goes to a file, of which a failure shows the end. --quiet would hide which versions contradict each other.
TOLD := grep -Ev '^(Collecting|Requirement|  (Downloading|Using|Obtaining)) ' $(LOG) | tail -n 20
install = { $(PY) -m pip install --no-compile --progress-bar off $(1) >$(LOG) 2>&1 || { $(TOLD) >&2; false; }; }
DONE := $(PY) -c 'import tiebreak.matrix.plugin' && touch $(STAMP)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv quick matrix platforms training test lint suite levels docs studies findings tables bench bench-gpu resolve dist release clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "  ARGS='...' goes to what is run; PYTHON=... picks the Python to make .venv with;"
	@echo "  make test LEVELS=all runs what computes at each instruction-set level of this CPU too"

venv: $(STAMP)  ## .venv with the pinned dependencies

define environment
	@rm -f $(STAMP) $(FULL)
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	  python='$(PYTHON)'; \
	  "$${python:-false}" -c '$(SUITABLE)' >/dev/null 2>&1 || { \
	    echo "tiebreak needs Python 3.11 or newer with its venv module; name one: make venv PYTHON=/path/to/python3" >&2; \
	    exit 1; }; \
	  echo "$(VENV): $$("$$python" --version); what pip says of the packages goes to $(LOG)"; \
	  "$$python" -m venv --clear $(VENV); }
@$(call install,pip)
endef

# The stamp comes last, so a failed install leaves none and the next call starts over.
$(STAMP): pyproject.toml constraints.txt
	$(environment)
	@$(call install,-e '.[test]')
	@$(DONE)

# With wheels that the matrix on a CPU does without, triton's 290 MB among them, and that there are not for every machine:
# each alone, where not all can be had.
$(FULL): pyproject.toml constraints.txt
	$(environment)
	@$(call install,-e $(ALL)) && $(DONE) $@ || { \
	  $(call install,-e '.[test]') && $(DONE) || exit 1; \
	  for extra in triton docs; do \
	    $(call install,-e ".[$$extra]") || echo "$$extra can't be installed: its tests are skipped, for that reason" >&2; \
	  done; }

# Each process would import what the cells do without: a quarter of a second.
matrix: $(STAMP)  ## the matrix on this platform
	$(PY) -m pytest -n auto -p no:hypothesispytest -p no:benchmark tests/matrix $(ARGS)

platforms: $(STAMP)  ## the matrix once per instruction-set level of this CPU, then the comparison
	$(VENV)/bin/tiebreak levels -n auto tests/matrix $(ARGS)

# Every seed runs, whatever the seeds before it did; the table shows what failed.
training: $(STAMP)  ## the short training runs at three seeds: table and figure
	@status=0; for seed in 1 2 3; do \
	  $(PY) -m pytest -n auto tests/matrix/test_cells.py --cases 'train_*' --seed $$seed --save training-$$seed $(ARGS) \
	    || status=$$?; \
	done; \
	for verb in show 'page -o out/training.svg'; do \
	  $(VENV)/bin/tiebreak $$verb out/training-1.json out/training-2.json out/training-3.json || status=$$?; \
	done; \
	exit $$status

# At other instruction-set levels than this process' own: LEVELS=all, or names that `tiebreak levels --list` shows.
LEVELS ?=
test: $(FULL) lint suite $(if $(LEVELS),levels)  ## lint, types and the whole test suite, held against the committed baseline

quick: $(STAMP)  ## what tells most in a minute: ruff, three inputs of the matrix, the tests that are marked quick
	$(PY) -m ruff check .
	$(PY) -m pytest -n auto -q tests/matrix --backend emulation,cpu --cases 'tied_maxima[k=2],sink_tie,random' $(ARGS)
	$(PY) -m pytest -n auto -q -m quick tests/unit tests/reports $(ARGS)

# A target beside lint: under --keep-going no finding of the linter hides the tests.
# The emulation's committed records gate this repository itself; --across: they are the same on every platform.
suite: $(FULL)
	$(PY) -m pytest -n auto --baseline reports/baselines/emulation.json --across $(ARGS)

levels: $(FULL)
	$(VENV)/bin/tiebreak levels --level '$(LEVELS:all=*)' -n auto -m native --backend cpu tests $(ARGS)

# All that is imported as tiebreak.*, then the other tests.
lint: $(STAMP)  ## ruff: rules and format; mypy --strict
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy -n auto .typing/tiebreak conftest.py tests --exclude '^tests/(matrix|programs|laboratory|defects|studies)/'

docs: $(FULL)  ## the documentation as a site: out/docs/site/index.html
	$(PY) -m tiebreak.studies.site out/docs
	$(PY) -m zensical build --clean --strict -f out/docs/mkdocs.yml

# False alarms of the default matrix; which planted defects it catches; bounds of the training runs; and others.
STUDY ?= alarms power bounds
alarms := alarms --seeds $(SEEDS)
bounds := spread --seeds $(SEEDS) --write
studies: $(STAMP)  ## what takes hours, and resumes: STUDY=alarms, power, bounds, budget, costs, bits, identification, mma_sim, models, reinforce or tolerance
	$(foreach study,$(STUDY),$(PY) -m tiebreak.studies.$(or $($(study)),$(study)) $(ARGS) &&) true

# Each in an environment of its own, with versions of its own: no constraint of this project holds there.
FINDING ?= *
findings:  ## the scripts of findings/, which install what they ask (GBs, half an hour): FINDING=name
	@status=0; for script in findings/$(FINDING).sh; do \
	  echo "$$script"; \
	  env -u PIP_CONSTRAINT -u PIP_BUILD_CONSTRAINT "$$script" || { echo "CHANGED, or not run: $$script"; status=1; }; \
	done; exit $$status

tables: $(STAMP)  ## the tables of docs/ that are made from kept results, or emulated; ARGS=--stale names stale ones
	$(PY) -m tiebreak.studies $(ARGS)

bench: $(STAMP)  ## benchmarks
	$(PY) -m pytest tests/bench -o python_files='bench_*.py' --benchmark-only \
	  --benchmark-columns=min,median,max $(ARGS)

bench-gpu: $(STAMP)  ## attention on a GPU, side by side with PyTorch's
	$(PY) -m pytest tests/bench/gpu -o python_files='bench_*.py' $(ARGS)

# Not by pip, which needs each Python, and downloads gigabytes where the index does not give metadata alone.
resolve: $(FULL)  ## that PyPI's wheels of all extras agree on each Python, in the pinned versions and in the newest
	@$(call install,uv)
	@sed -n 's/.*:: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml | xargs -P 3 -I % sh -c ' \
	  for pins in "-c constraints.txt" ""; do \
	    $(VENV)/bin/uv pip compile --quiet --system-certs --only-binary :all: --python-version % $$pins --all-extras \
	      pyproject.toml >/dev/null || { echo "Python %: not installable, $${pins:-the newest of all}" >&2; exit 1; }; \
	  done; \
	  echo "Python %: all extras can be installed"'

dist: $(STAMP)  ## sdist and wheel, built in isolation, checked, and tried in empty environments
	@$(call install,-e '.[release]')
	rm -rf dist
	$(PY) -m build
	$(PY) -m twine check --strict dist/*
	$(VENV)/bin/check-wheel-contents dist/*.whl
	$(VENV)/bin/pyroma --min 8 dist/*.tar.gz
	PYTHON=$(PY) .ci/trial dist/*.whl
	PYTHON=$(PY) .ci/trial dist/*.tar.gz

# What only a person can do comes first.
release: $(STAMP)  ## the same, once version, changelog and who publishes are there; then the commands that push it
	@test -z "$$(git status --porcelain)" || { echo "git status: commit first" >&2; exit 2; }
	@grep -q '^## $(VERSION) (' CHANGELOG.md || { \
	  echo "CHANGELOG.md: put what is unreleased under '## $(VERSION) (DATE)'" >&2; exit 2; }
	@! grep -q OWNER pyproject.toml || { echo "pyproject.toml: put who publishes in the place of OWNER" >&2; exit 2; }
	@$(MAKE) --no-print-directory dist
	@echo "to push it: git tag v$(VERSION) && git push origin v$(VERSION) && $(PY) -m twine upload dist/*"

clean:  ## remove .venv, build files and caches (records in out/ stay)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
