# Everything runs in .venv, which is made here and kept up to date.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev
STAMP := $(VENV)/.installed-$(EXTRAS)

# Compiled programs are kept, for other checkouts too: the tests take a fraction
# of the time.
RUN = JAX_COMPILATION_CACHE_DIR="$${XDG_CACHE_HOME:-$$HOME/.cache}/specjax/jax" \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 $(VENV)/bin/python

# A few arms of the sweep; without this it takes a quarter of an hour.
SHORT = $(addprefix --config.speedup.,batches=1,8 ks=1,2,4,8,16 \
	controllers=adaptive,)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-exhaustive lint clean

help: ## list what there is to do
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | \
		sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | \
		while IFS='|' read -r name what; do printf '%-18s %s\n' "$$name" "$$what"; done

demo: $(STAMP) ## train a target, distil drafts, measure the speedup (ten minutes)
	$(RUN) train/pretrain.py --config configs/stdlib.py
	$(RUN) eval/ablation.py --config configs/stdlib.py
	$(RUN) eval/speedup.py --workdir runs/stdlib $(SHORT)
	$(RUN) eval/generate.py --workdir runs/stdlib --prompt "def main("

test: $(STAMP) ## run the tests but the slow ones
	$(RUN) -m pytest -q -m "not slow" -n 2 --dist loadfile

test-slow: $(STAMP) ## run the slow tests
	$(RUN) -m pytest -q -m slow -n 2 --dist loadscope --ignore tests/overhead_test.py
	$(RUN) -m pytest -q -m slow tests/overhead_test.py  # timed, so alone

test-exhaustive: $(STAMP) ## enumerate the rules on all tables (15 minutes)
	$(RUN) -m pytest -q -m slow tests/enumeration_test.py --exhaustive

lint: $(STAMP) ## check style and formatting
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean: ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) "$${XDG_CACHE_HOME:-$$HOME/.cache}/specjax/jax" .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# The stamp comes last: an install that was interrupted is done again.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		> /dev/null 2>&1 || { echo "make: $(PYTHON) is no Python 3.11 or newer;" \
		"name one with make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "installing into $(VENV) (once, a minute or two) ..."
	@rm -f $@ && mkdir -p $(VENV)
	@{ $(PYTHON) -m venv $(VENV) && $(VENV)/bin/python -m pip install \
		--disable-pip-version-check --editable '.[$(EXTRAS)]'; } \
		> $(VENV)/install.log 2>&1 || { \
		grep -v 'already satisfied' $(VENV)/install.log | tail -n 15 >&2; \
		echo "make: the install failed; all of it is in $(VENV)/install.log" >&2; exit 1; }
	@touch $@
