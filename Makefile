# Each target sets up what it needs: `make study` and `make test` work on a fresh machine with Python and make.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
WORKERS ?= 2

.PHONY: setup test slow soak check format audit study docs clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

test: $(READY)  ## the suite, a few minutes on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS)

slow: $(READY)  ## the longer tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m 'slow and not soak and not gpu'

soak: $(READY)  ## fault tests at full counts, and what installs large packages
	$(BIN)/python -m pytest -q -m 'soak and not gpu'

check: $(READY)  ## format, lint, types, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

audit:  ## known vulnerabilities of the pinned packages; fails where their database cannot be reached
	test -x .venv-audit/bin/pip-audit || $(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	.venv-audit/bin/pip-audit --strict --requirement constraints.txt --disable-pip --no-deps || { echo \
		"audit: a package has known vulnerabilities, or pypi.org/pypi, which lists them, does not answer" \
		"(through a mirror without that list packages are 'not found on PyPI')" >&2; exit 1; }

study: $(READY)  ## the main job on a synthetic shop: laws, a report and a recipe in minutes; run again to go on
	$(BIN)/habitus study --preset quick --out out/study

docs: $(READY)  ## the site, in out/site: a broken link or an undocumented option is an error
	$(BIN)/python docs/site.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-audit out .pytest_cache .mypy_cache .ruff_cache .hypothesis
