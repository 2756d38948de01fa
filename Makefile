# Every target makes what it needs by itself: `make demo` and `make test` start from a bare clone.
# PYTHON=python3.12 picks another interpreter for the virtual environment.

STORE ?= posix
DATABASE ?= sqlite
VENV := .venv
# Arguments for pytest, for example: make test ARGS='tests/unit -k digest'
ARGS ?=
# Test processes. Each starts servers of its own; four fill two cores, as tests wait for their servers.
WORKERS ?= 4
# make bench: the bytes of the state, and how often everything is measured.
SIZE ?= 1GiB
REPEATS ?= 5
# cuda: the state is on the GPU, and benchmarks/results/gpu.json is written.
DEVICE ?= cpu
# make soak, make chaos, make jepsen: how long everything runs at once.
MINUTES ?= 10
# make chaos: yes for jobs whose nodes have agents, and nodes that are lost.
AGENTS ?=
# make preempt: how many launches are told to leave.
TIMES ?= 100

# make scale: how many ranks save one checkpoint at once, and how large the catalogs are in which each call is timed.
RANKS ?= 64,256,1024,4096
CHECKPOINTS ?= 1000,10000,1000000

.PHONY: help demo test test-slow test-all test-web check prove soak chaos jepsen rehearse preempt bench scale siege run format \
	docs manifests site lock sbom venv

help:
	@echo 'make demo [STORE=posix|s3|azure] [DATABASE=sqlite|postgres] [LOOK=yes]   train, be killed, resume: watch it happen'
	@echo 'make test [ARGS=...]                                    the fast gate: what each part promises, on real servers'
	@echo 'make test-slow                                          the rest: chaos, frameworks, the second database'
	@echo 'make test-all                                           both in one run, as CI has it'
	@echo 'make test-web [ARGS=...]                                the web page in a real browser, a part of test-slow'
	@echo 'make check                                              ruff, mypy and import-linter'
	@echo 'make prove [RULES=...]                                  take guards out: do tests notice?'
	@echo 'make soak [MINUTES=10] [AGENTS=yes]                     everything at once, with kill -9: is anything lost?'
	@echo 'make chaos [MINUTES=10] [AGENTS=yes]                    torchrun jobs while everything fails: unharmed?'
	@echo 'make jepsen [MINUTES=10] [AGENTS=yes]                   every part fails, the database goes back: all commits there?'
	@echo 'make rehearse                                           a failover to a synchronous standby: is anything lost?'
	@echo 'make preempt [TIMES=100] [AGENTS=yes]                   SIGTERM at random moments: is the newest state saved?'
	@echo 'make bench [SIZE=1GiB] [REPEATS=5] [DEVICE=cuda]        beside its peers: docs/performance.md'
	@echo 'make scale [RANKS=64,256] [CHECKPOINTS=1000,1000000]    what many ranks, and many checkpoints, cost the service'
	@echo 'make siege                                              the rate of saves under attack: is the bar met?'
	@echo 'make run                                                the service on http://127.0.0.1:8400'
	@echo 'make format                                             let ruff fix and format the code'
	@echo 'make docs                                               write the pages that are made of the code anew'
	@echo 'make manifests                                          render deploy/kubernetes from the Helm chart'
	@echo 'make site                                               the documentation as a site, in site/'
	@echo 'make lock                                               choose the versions of the image anew, with hashes and licences'
	@echo 'make sbom                                               list what the image ships: bill of materials and licences'

demo: venv
	@$(VENV)/bin/python examples/demo/orchestrate.py --store $(STORE) --database $(DATABASE) $(if $(LOOK),--look)

test: SELECTED = -m 'not slow'
test-slow: SELECTED = -m slow
test-all: SELECTED = --databases in-turn

# The exit code is kept for .ci/run: make itself turns every failure into 2. Hundreds of servers and jobs are started,
# so what was compiled is kept whatever the environment says; files are taken in the order of tests/conftest.py.
# No test is run twice: one that fails once is a defect of the test or of the product.
test test-slow test-all: venv
	@rm -f $(VENV)/.test-exit-code; \
	PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(SELECTED) $(ARGS); code=$$?; \
	echo $$code > $(VENV)/.test-exit-code; exit $$code

# Of the slow gate. A browser is fetched from Debian's archive once.
test-web: venv
	@$(VENV)/bin/python -m pytest -n 2 --dist loadfile tests/web $(ARGS)

check: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# Takes the guards of the rules out of copies of the committed tree, one at a time, and sees tests fail.
prove: venv
	$(VENV)/bin/python -m scripts.prove_guards $(RULES)

# Service, workers, writers and readers on Postgres and SeaweedFS, killed at random; see tests/soak. With AGENTS=yes all
# writers but one hand their saves to node agents.
soak: venv
	@$(VENV)/bin/python -m tests.soak --minutes $(MINUTES) $(if $(AGENTS),--agents)

# Real torchrun jobs, and everything that they need is killed, parted, spoilt or filled up; see tests/chaos_run.
chaos: venv
	@$(VENV)/bin/python -m tests.chaos_run --minutes $(MINUTES) $(if $(AGENTS),--agents)

# Two services, a worker, two stores and four jobs, a model of every commit, and failovers; see tests/jepsen. With AGENTS=yes
# three of the jobs hand their saves to a node agent, which fails too.
jepsen: venv
	@$(VENV)/bin/python -m tests.jepsen --minutes $(MINUTES) $(if $(AGENTS),--agents)

# Postgres with a synchronous standby, jobs that save, kill -9 of the primary, and a promotion; docs/operating/disaster.md.
rehearse: venv
	@$(VENV)/bin/python -m scripts.rehearse_failover

# SIGTERM at a random moment, so many times, on two ranks: is the newest state there afterwards? See tests/preemption.
# With AGENTS=yes each launch is a `holdfast launch --agent`.
preempt: venv
	@$(VENV)/bin/python -m tests.preemption --times $(TIMES) $(if $(AGENTS),--agents)

# Writes benchmarks/results/latest.json and the plot; with DEVICE=cuda benchmarks/results/gpu.json alone. Leave the machine alone meanwhile: half an hour with the defaults.
bench: venv
	@$(VENV)/bin/python -m benchmarks.run --size $(SIZE) --repeats $(REPEATS) --device $(DEVICE)

# Writes benchmarks/results/scale.json and its plot. Leave the machine alone meanwhile, too: an hour with the defaults.
scale: venv
	@$(VENV)/bin/python -m benchmarks.scale --ranks $(RANKS) --checkpoints $(CHECKPOINTS)

# Writes benchmarks/results/siege.json: the rate of saves under attack, and whether the bar is met. Leave the machine alone, five minutes.
siege: venv
	@$(VENV)/bin/python -m benchmarks.siege

run: venv
	@$(VENV)/bin/holdfast serve

format: venv
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: venv
	$(VENV)/bin/python scripts/write_settings_page.py
	$(VENV)/bin/python -m scripts.write_dashboards
	$(VENV)/bin/python scripts/write_dashboard_views_page.py
	$(VENV)/bin/python scripts/write_access_page.py

# The plain manifests of deploy/kubernetes, from the chart.
manifests: venv
	$(VENV)/bin/python -m scripts.write_manifests

# Strict: a link or an anchor that leads nowhere fails the build. Open site/index.html, from the disk too.
site: venv
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict

# Writes deploy/requirements.lock, deploy/sbom.cdx.json and docs/reference/licences.md; asks the index that pip and uv ask.
lock: venv
	$(VENV)/bin/python -m scripts.supply_chain.lock

sbom: venv
	$(VENV)/bin/python -m scripts.supply_chain.lock --list

venv:
	@scripts/prepare-venv $(VENV)
