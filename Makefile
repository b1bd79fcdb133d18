PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: clients demo docs reference test test-long lint sim mutants fuzz schemathesis soak proto lock venv
.PHONY: clean faults help image test-vllm

# Lists the targets that CONTRIBUTING.md explains.
help:
	@grep '^make ' CONTRIBUTING.md

# Reinstalls only when pyproject.toml changes.
$(VENV)/.installed: pyproject.toml
	@echo "Installing into $(VENV), some minutes: 2 GiB, or 6 GiB if pip takes torch with CUDA"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[dev]'
	@touch $@

venv: $(VENV)/.installed

demo: venv
	$(BIN)/kvrelay demo
	@echo "Next: $(BIN)/kvrelay serve"

# JOBS processes run the unit tests; each file runs in one process. CLUSTER_JOBS processes run the
# tests of whole clusters. Tests that share a cluster run in one process, so the cluster starts
# once. Tests start hundreds of processes, so what is compiled is kept.
unexport PYTHONDONTWRITEBYTECODE
JOBS ?= 4
CLUSTER_JOBS ?= 3
CLUSTERS := tests/cluster tests/faults
PYTEST := $(BIN)/python -m pytest --durations 10 -m 'not long'
test: venv lint
	$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder $(CLUSTERS:%=--ignore %)
	$(PYTEST) -n $(CLUSTER_JOBS) --dist loadfile $(CLUSTERS)

# Tests of workers on vLLM's CPU build, in an environment of their own: identity, then the fault
# matrix.
VLLM_VENV := build/vllm-venv
VLLM_ROWS := death cancel lease state drain repeat network oddities
$(VLLM_VENV)/.installed: pyproject.toml scripts/vllm_cpu_environment.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python scripts/vllm_cpu_environment.py
	@touch $@

test-vllm: $(VLLM_VENV)/.installed
	KVRELAY_FAULTS_ENGINE=vllm $(VLLM_VENV)/bin/python -m pytest --durations 10 tests/vllm_engine
	KVRELAY_FAULTS_ENGINE=vllm $(VLLM_VENV)/bin/python -m pytest --durations 10 --timeout 1800 \
	  $(VLLM_ROWS:%=tests/faults/test_rows_%.py)

# All cases of ten client libraries from PyPI, each with its decode worker killed in the middle.
clients: venv
	$(BIN)/python benchmarks/clients/run_clients.py

# Tests that take long or need the machine for themselves.
test-long: venv
	$(BIN)/python -m pytest --durations 10 -m long

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m pytest tests/house/test_links.py tests/mutants/test_mutants_apply.py

# Builds the documentation site in build/site. Its environment has no torch and no Ray.
# --quiet would hide warnings from --strict.
DOCS_VENV := build/docs-venv
$(DOCS_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

docs: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@echo "To read it: $(PYTHON) -m http.server -d build/site -b 127.0.0.1 8080"
	@echo "Then open http://127.0.0.1:8080/"

# Generates the reference pages from the code: command line, configuration, errors.
reference: venv
	$(BIN)/python scripts/write_reference.py

# Removes each safeguard in a copy of the source and checks that a test fails.
mutants: venv
	$(BIN)/python tests/mutants/run.py

# Simulates SEEDS histories of a cluster in virtual time, on all cores. docs/testing.md explains how
# to replay a history.
SEEDS ?= 10000
sim: venv
	$(BIN)/python tests/simulation/run.py --seeds $(SEEDS)

# Fuzzes damaged hand-offs, then every parser of external input, for SECONDS each.
SECONDS ?= 120
fuzz: venv
	$(BIN)/python tests/unit/kv_transfer/fuzz_frames.py --seconds $(SECONDS)
	$(BIN)/python tests/fuzz/run.py --seconds $(SECONDS)

# Tests the HTTP endpoint with requests that its OpenAPI description allows, and with others.
EXAMPLES ?= 200
schemathesis: venv
	SCHEMATHESIS_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest tests/unit/router/api/http/test_openapi_schemathesis.py --timeout 3600

soak: venv
	$(BIN)/python tests/unit/kv_transfer/soak_handoffs.py

# The fault matrix on real processes. With LONG=1, outages have their maximal length.
LONG ?= 0
faults: venv
	LONG=$(LONG) $(BIN)/python -m pytest tests/faults

proto: venv
	$(BIN)/python scripts/generate_stubs.py

# Locks the packages of the images, with hashes. UV_FIND_LINKS or UV_EXTRA_INDEX_URL must point to
# the CPU build of torch.
UV ?= uv
COMPILE := $(UV) pip compile --quiet --no-header --no-annotate --generate-hashes --python-version 3.11 \
  --python-platform x86_64-manylinux_2_28
lock:
	$(COMPILE) --extra cluster --extra otel pyproject.toml requirements/image.in \
	  requirements/torch-cpu.in -o requirements/cpu.lock
	UV_FIND_LINKS= UV_EXTRA_INDEX_URL= $(COMPILE) --extra cluster --extra otel --extra vllm --extra nixl \
	  --override requirements/vllm-override.in pyproject.toml requirements/image.in \
	  requirements/torch-cuda.in -o requirements/cuda.lock
	$(COMPILE) requirements/build.in -o requirements/build.lock

# Builds the container image that compose.yaml and k8s/ use. DOCKER may be podman.
DOCKER ?= docker
image:
	$(DOCKER) build -t kvrelay:0.1.0 .

clean:
	rm -rf $(VENV) build dist *.egg-info
