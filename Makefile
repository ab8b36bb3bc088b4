# The two commands: `make book` and `make test`. Each sets itself up in a fresh clone. GNU make 3.81 is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export JUPYTER_PLATFORM_DIRS := 1

.PHONY: book test full lab serve bench clean lint help
book: $(READY)
	$(BIN)/python book/build.py

help:
	@echo "make book   execute what changed and build the site (prints where it is)"
	@echo "make test   lint, tests, the book, and the site in a browser"
	@echo "make full   the book at the paper-like scale, and once more to see that it repeats (hours)"
	@echo "make lab    JupyterLab; the text notebooks open as notebooks"
	@echo "make serve  the built site on http://localhost:8000"
	@echo "make bench  side-by-side measurements (minutes to half an hour)"
	@echo "make clean  remove _build (executed notebooks, site, memo); .venv stays"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

test: lint book
	$(BIN)/python -m pytest -n 2 --dist loadgroup

full: $(READY)
	$(BIN)/python book/build.py --scale full
	$(BIN)/python benchmarks/_runs.py full
	DITBOOK_REPEAT=full $(BIN)/python -m pytest tests/test_repeat.py

lab: $(READY)
	$(BIN)/jupyter lab --ServerApp.root_dir=. notebooks

serve: book
	$(BIN)/python -m http.server 8000 --bind localhost --directory _build/html

bench: $(READY)
	$(BIN)/python benchmarks/_runs.py bench

clean:
	rm -rf _build

# The environment follows the lock: same versions everywhere.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; $(PYTHON) is `$(PYTHON) --version 2>&1`. Try: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	@# JupyterLab opens text notebooks as notebooks.
	$(BIN)/jupytext-config --settings-file $(VENV)/etc/jupyter/labconfig/default_setting_overrides.json \
	  set-default-viewer markdown
	@touch $@
