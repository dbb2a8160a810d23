# For a fresh clone: `make demo` and `make test`. Each makes .venv first; `make env` does only that.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: env demo test

env: $(INSTALLED)

# Install again only when what is to be installed has changed.
$(INSTALLED): setup.py pyproject.toml requirements/cpu.txt tools/make_env.sh
	@bash tools/make_env.sh "$(PYTHON)" "$(VENV)" requirements/cpu.txt
	@touch "$@"

demo: $(INSTALLED)
	@"$(VENV)/bin/hyper-parallel" compare examples/demo.yaml

test: $(INSTALLED)
	@"$(VENV)/bin/python" -m tests
