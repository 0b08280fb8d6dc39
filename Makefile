# Needs Go and make; `make deps` installs the other tools. CI calls the same targets, see .ci/run.

SHELL := bash
.DEFAULT_GOAL := help

PKG       ?= ./...
# chosen is PKG, or without a PKG the packages that its argument lists.
chosen     = $(if $(filter file,$(origin PKG)),$(1),$(PKG))
# TEST lists all packages but those of `make integration`, `make browser` and `make generated`.
TEST       = $(shell go list ./... | grep -vE '/tests/(integration|chaos|browser)$$|/acl/derive$$')
# RACE lists packages whose goroutines share memory: the roles and their consumers of streams, guards
# and accounts, the servers and their event streams, and what batches or caches calls.
RACE      := ./client/... ./entry ./guard ./processor/... ./run ./internal/access/... ./internal/calls/lending ./internal/process/app \
	./internal/process/roles ./internal/redisx ./internal/redisx/stream ./internal/redisx/wm ./internal/room/broker \
	./internal/room/entrytoken ./internal/room/position ./internal/room/roomapi ./internal/stage/... ./internal/telemetry ./internal/web/... \
	$(addprefix ./internal/jobs/,aggregator callbacks dispatcher fetcher groups/... ingest watcher worker)
TESTFLAGS ?=
FUZZTIME  ?= 10s
SOAKTIME  ?= 10m
# PARALLEL is how many packages, and how many tests of each, run at once: twice the number of CPUs,
# because most tests wait for other processes and for time.
PARALLEL  ?= $(shell echo $$((2 * $$(getconf _NPROCESSORS_ONLN))))
# FLOW lists the parts that bench-flow measures. FLOW=congestion FLOWFLAGS=--quick takes a minute.
FLOW      ?= congestion limits fairness
FLOWFLAGS ?=

# PERFFLAGS are flags of bench-performance. PERFFLAGS='--quick --only base,latency' takes little
# time.
PERFFLAGS ?=

# GUARDSFLAGS are flags of bench-guards.
GUARDSFLAGS ?=

# CONSOLEFLAGS are flags of bench-console.
CONSOLEFLAGS ?=

# ROOMFLAGS are flags of bench-room.
ROOMFLAGS ?= --users 5000 --brokers 3

LINT_VERSION := 2.15.0
# LINT is the installed golangci-lint if it has exactly this version; otherwise a copy in .bin.
LINT = $(shell golangci-lint version 2>/dev/null | grep -q 'version v\?$(LINT_VERSION) ' && command -v golangci-lint || echo $(OWN_LINT))
OWN_LINT := $(CURDIR)/.bin/golangci-lint-$(LINT_VERSION)

.PHONY: help
help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: deps
deps: ## Install redis-server, which the tests need, unless it is installed
	@bash .ci/deps redis-server

.PHONY: build
build: ## Build the binaries into bin/
	go build -o bin/ ./cmd/...

# VERSION is the version of the archives of make dist, such as v1.2.0.
VERSION ?= $(shell git describe --tags --always --dirty)
DIST    ?= linux/amd64 linux/arm64 darwin/amd64 darwin/arm64

.PHONY: dist
dist: ## Build archives of the binaries for linux and darwin into dist/, with checksums; needs GNU tar
	@VERSION=$(VERSION) deployments/dist $(DIST)

.PHONY: image
image: ## Build the image bulkaction:local
	docker build -f deployments/docker/Dockerfile -t bulkaction:local \
		--build-arg VERSION=$(VERSION) --build-arg REVISION=$$(git rev-parse HEAD) .

.PHONY: compose-test
compose-test: ## Test the image and compose.yaml under faults, on a Docker engine; without one it starts its own, as root on Debian
	@.ci/compose-test $(TESTFLAGS)

.PHONY: dist-check
dist-check: ## Check that the same revision gives the same archive: build it twice, in two folders, once without a cache
	@deployments/dist-check $(firstword $(DIST))

# SBOM is the folder of make sbom.
SBOM ?= bin/sbom
SBOM_TOOL := github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@v1.9.0

.PHONY: sbom
sbom: build ## List the modules in each binary, with licences, as CycloneDX in bin/sbom (or SBOM=dir); needs the Go module proxy
	@.ci/sbom bin '$(SBOM)' '$(VERSION)' go run $(SBOM_TOOL)

VULN_VERSION := 1.9.0
VULN := $(CURDIR)/.bin/govulncheck-$(VULN_VERSION)

.PHONY: vuln
vuln: $(VULN) ## Check for calls of functions with known vulnerabilities; needs https://vuln.go.dev, or VULNDB=file:///DIR
	@VULNDB='$(VULNDB)' .ci/vuln $(VULN) $(PKG)
	@cd bench && VULNDB='$(VULNDB)' ../.ci/vuln $(VULN) ./...

.PHONY: fmt
fmt: lint-tool ## Format the code
	$(LINT) fmt

.PHONY: vet
vet: ## Run go vet
	go vet $(PKG)
	go vet -tags browser ./tests/browser
	go vet -tags engine ./deployments/compose
	cd bench && go vet ./...
	cd tests/k8s && go vet ./...
	cd tests/release && go vet ./...

.PHONY: lint
lint: lint-tool ## Check the format and the rules in .golangci.yml
	GOFLAGS="$$GOFLAGS -buildvcs=false" $(LINT) run $(PKG)
	cd bench && GOFLAGS="$$GOFLAGS -buildvcs=false" $(LINT) run --config ../.golangci.yml ./...
	cd tests/k8s && GOFLAGS="$$GOFLAGS -buildvcs=false" $(LINT) run --config ../../.golangci.yml ./...
	cd tests/release && GOFLAGS="$$GOFLAGS -buildvcs=false" $(LINT) run --config ../../.golangci.yml ./...

.PHONY: lua
lua: ## Check the Lua scripts with luacheck, which it installs unless it is installed
	@bash .ci/deps luacheck
	go run ./internal/testkit/luacheck

.PHONY: check
check: vet lint deps ## Before a commit: format, vet, lint and short tests
	go test -short $(TESTFLAGS) $(call chosen,$(TEST))

.PHONY: test
test: deps ## Run the tests of all packages but those of integration and browser; BENCH=. runs each benchmark once, too; COVER=1 prints how much of each package its tests reach
	$(if $(COVER),set -o pipefail; )go test -p $(PARALLEL) -parallel $(PARALLEL) $(if $(COVER),-cover) $(TESTFLAGS) $(call chosen,$(TEST)) $(if $(BENCH),-args -test.bench=$(BENCH) -test.benchtime=1x)$(if $(COVER), | .ci/coverage)
	$(if $(filter file,$(origin PKG)),cd bench && go test -timeout 20m $(TESTFLAGS) ./...)

# STORES lists the packages whose contract tests run on all kinds of servers. The tests that are left
# out run on one server of their own.
STORES := ./guard ./internal/jobs/ledger ./internal/room/waitingroom

.PHONY: stores
stores: deps ## Run the contract tests of ledger, guards and rooms on all kinds of servers, also BULKACTION_REDIS_SERVERS=/path/a:/path/b
	go test -count=1 -timeout 30m -skip 'Model|Scenes|RedisAway' $(TESTFLAGS) $(STORES)

.PHONY: release-test
release-test: ## Test that `go install` of a version works (some minutes), and that the API is compatible with the last release
	cd tests/release && go test -timeout 20m $(TESTFLAGS) ./...

.PHONY: race
race: deps ## Run the tests of packages that share memory between goroutines with the race detector; PKG=./... selects
	@bash .ci/deps cc
	go test -race $(TESTFLAGS) $(call chosen,$(RACE))

# TESTBIN is the folder of the programs that tests run as processes. internal/testkit/proctest builds
# them with the same flags where no make has done it.
TESTBIN := $(CURDIR)/bin/test

.PHONY: testbin
testbin:
	@go build -buildvcs=false -ldflags='-s -w -X github.com/bulkaction/bulkaction/lua.changed=CHAOS_LUA' -o $(TESTBIN)/ \
		./cmd/bulkaction ./tests/testworker $(addprefix ./examples/,credential-pool custom-processor custom-reducer embedded protected-shop)

.PHONY: integration
integration: deps testbin ## Run the tests across processes, and the commands of the documents
	BULKACTION_TEST_BIN=$(TESTBIN) go test -timeout 20m -p $(PARALLEL) -parallel $(PARALLEL) $(TESTFLAGS) ./tests/integration ./tests/chaos

AXE := $(CURDIR)/.bin/axe-core-4.14.1.js

.PHONY: k8s
k8s: deps testbin ## Test the Helm chart, a Go module of its own: renders it, checks the objects, and runs its containers as processes
	cd tests/k8s && BULKACTION_TEST_BIN=$(TESTBIN) go test -timeout 20m $(TESTFLAGS) ./...

.PHONY: chart
chart: ## Write deployments/kubernetes and the chart's copies of alerts and dashboards
	cd tests/k8s && go run ./render

.PHONY: browser
browser: deps testbin ## Test the web pages in Chromium, which it installs unless it is installed; needs npm once, for axe-core
	@bash .ci/deps chromium
	@bash .ci/axe $(AXE)
	BULKACTION_TEST_BIN=$(TESTBIN) go test -tags browser -count=1 -parallel 4 ./tests/browser -axe $(AXE) $(TESTFLAGS)

PROMETHEUS := $(CURDIR)/.bin/prometheus

.PHONY: rules
rules: ## Check and test the rules of Prometheus with promtool, which it fetches unless it is there
	@bash .ci/prometheus $(PROMETHEUS)
	$(PROMETHEUS)/promtool check rules deployments/prometheus/rules.yaml
	cd deployments/prometheus && $(PROMETHEUS)/promtool test rules rules_test.yaml

.PHONY: alerts
alerts: rules deps testbin ## Cause each alert in a running system that a Prometheus scrapes (some minutes)
	BULKACTION_TEST_BIN=$(TESTBIN) go test -tags alerts -count=1 -timeout 20m $(TESTFLAGS) ./tests/integration -run '^TestAlerts$$' -args -prometheus $(PROMETHEUS)/prometheus

.PHONY: screenshots
screenshots: ## Write the pictures in docs/waiting-room and docs/console
	@mkdir -p docs/waiting-room docs/console
	@$(MAKE) --no-print-directory browser TESTFLAGS='-run "Screenshots" -screenshots $(CURDIR)/docs'

.PHONY: mutants
mutants: deps ## Break one promise at a time and check that a named test fails; MUTANTS='limit reduce-once' selects, RUNS=3 repeats
	go run ./tests/mutants -runs $(or $(RUNS),1) $(MUTANTS)

.PHONY: fuzz
fuzz: deps ## Run each fuzz test for FUZZTIME (10s by default)
	@set -e; \
	files=$$(grep -rl --include='*_test.go' '^func Fuzz' .) || { echo "no fuzz targets"; exit 0; }; \
	for file in $$files; do \
		for target in $$(sed -n 's/^func \(Fuzz[A-Za-z0-9_]*\)(.*/\1/p' $$file); do \
			echo "fuzz $$(dirname $$file) $$target"; \
			go test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) $$(dirname $$file); \
		done; \
	done

.PHONY: soak
soak: deps ## Run the property tests with random seeds for SOAKTIME (10m by default); PKG=./guard selects
	@BULKACTION_SOAK=1 SOAKTIME='$(SOAKTIME)' bash .ci/soak $(PKG)

.PHONY: newseed
newseed: deps ## Run the property tests once with new random seeds, which it prints
	@SOAKTIME=0s bash .ci/soak $(PKG)

.PHONY: bench
bench: deps ## Run each benchmark once, to check that it works
	go test -run '^$$' -bench . -benchtime 1x $(TESTFLAGS) $(call chosen,$(TEST))

# bench-json stores the output of a benchmark, with its flags, in docs/plots.
bench-json = mkdir -p docs/plots; (cd bench && go run . $(1) $(2) --json) > docs/plots/$(1).json.new && mv docs/plots/$(1).json.new docs/plots/$(1).json || exit 1

.PHONY: bench-flow
bench-flow: deps ## Measure flow control (about 25 minutes) and write docs/plots/*.json
	$(foreach what,$(FLOW),$(call bench-json,$(what),$(FLOWFLAGS));)

.PHONY: bench-peers
bench-peers: deps ## Compare with asynq and a raw stream (some minutes); PEERSFLAGS='--rounds 5 --json', see bench/README.md
	cd bench && go run . peers $(PEERSFLAGS)

.PHONY: bench-guards
bench-guards: deps ## Measure package guard (3 minutes); write docs/plots/guards.json and its table; GUARDSFLAGS=--quick
	$(call bench-json,guards,$(GUARDSFLAGS))
	@$(MAKE) --no-print-directory plots

.PHONY: bench-room
bench-room: deps ## Measure the waiting room (2 minutes); write docs/plots/room.json and its table; ROOMFLAGS='--users 3000'
	$(call bench-json,room,$(ROOMFLAGS))
	@$(MAKE) --no-print-directory plots

.PHONY: bench-console
bench-console: deps ## Measure the web console (3 minutes); write docs/plots/console.json and its table; CONSOLEFLAGS='--groups 1000'
	$(call bench-json,console,$(CONSOLEFLAGS))
	@$(MAKE) --no-print-directory plots

.PHONY: bench-performance
bench-performance: deps ## Measure speed (10 minutes); write docs/plots/performance.json and the table of docs/performance.md; PERFFLAGS=--quick
	$(call bench-json,performance,$(PERFFLAGS))
	@$(MAKE) --no-print-directory plots

.PHONY: bench-compare
bench-compare: deps ## Compare the speed with that of another revision, in alternating runs; BASE=rev, ROUNDS=5, VARIANTS='base http', COUNT=6, OUT=file.json
	BASE='$(BASE)' bash bench/compare.sh

.PHONY: chaos
chaos: deps testbin ## Run the system under faults for 15 minutes; CHAOS_SEED, CHAOS_JOBS, CHAOS_PHASES, CHAOS_OUT=report.json, CHAOS_PAGE=docs/reliability.md
	CHAOS_FULL=1 CHAOS_SEED='$(CHAOS_SEED)' CHAOS_JOBS='$(CHAOS_JOBS)' CHAOS_PHASES='$(CHAOS_PHASES)' CHAOS_OUT='$(abspath $(CHAOS_OUT))' CHAOS_PAGE='$(abspath $(CHAOS_PAGE))' \
		BULKACTION_TEST_BIN=$(TESTBIN) go test ./tests/chaos -run '^TestChaos$$' -count=1 -timeout 60m -v

.PHONY: plots
plots: ## Draw docs/plots/*.svg and write the tables of figures in docs, from the JSON files in docs/plots
	cd bench && go run . plots

.PHONY: docs
docs: ## Generate files, for example docs/configuration.md
	go generate ./...

GENERATED := $(addprefix deployments/grafana/,overview.json flow.json roles.json redis.json api.json waiting-room.json) docs/configuration.md internal/process/app/help.txt internal/redisx/acl/roles_gen.go deployments/redis/users.acl

.PHONY: generated
generated: ## Check that the generated files are those of the code, and test the generator of Redis rights
	go test $(TESTFLAGS) ./internal/redisx/acl/derive
	@set -e; before=$$(cat $(GENERATED) | cksum); $(MAKE) --no-print-directory docs; \
	[ "$$before" = "$$(cat $(GENERATED) | cksum)" ] || \
		{ echo "generated files were stale; commit what is written now: $(GENERATED)" >&2; exit 1; }

.PHONY: clean
clean: ## Remove the built files
	rm -rf bin .bin

.PHONY: lint-tool
lint-tool:
	@if [ "$(LINT)" = "$(OWN_LINT)" ]; then $(MAKE) --no-print-directory "$(OWN_LINT)"; fi

$(OWN_LINT):
	GOBIN="$(CURDIR)/.bin" GOFLAGS=-buildvcs=false go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v$(LINT_VERSION)
	mv .bin/golangci-lint "$@"

$(VULN):
	GOBIN="$(CURDIR)/.bin" GOFLAGS=-buildvcs=false go install golang.org/x/vuln/cmd/govulncheck@v$(VULN_VERSION)
	mv .bin/govulncheck "$@"
