# Latticekeep's commands. A fresh machine needs Go, make, git and kubectl; everything else is compiled from the Go module proxy into
# bin/, once.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Only the race detector needs C: without it the program is static, and build and tests share one compile.
export CGO_ENABLED := 0
# gin then leaves out MessagePack, which nothing here uses: 25 s of the compile (docs/adr/0014-size.md).
# Everything is compiled with it and without paths, so that the program is that of the Dockerfile, and tests share its compile.
export GOFLAGS := -tags=nomsgpack -trimpath $(GOFLAGS)
BUILD := go build -ldflags="-s -w"

BIN := $(CURDIR)/bin
DATA_DIR ?= .latticekeep
FUZZTIME ?= 30s
BENCHTIME ?= 3s
GROWTH ?= 3000000
# The slowest package alone, on a busy machine of two cores; go test's own limit of ten minutes is for faster ones.
TEST_TIMEOUT ?= 25m
# Comments behind code that are half a sentence, at most.
FRAGMENTS ?= 20

MODULES := . hack/coredns hack/csi hack/docs hack/etcd hack/helm hack/k8s hack/lint hack/prometheus hack/tools hack/vale hack/versitygw

.PHONY: help
help: ## show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## compile bin/latticekeep
	$(BUILD) -o $(BIN)/latticekeep .

.PHONY: size
size: ## say how many MB of the program each module has
	@hack/size.sh

.PHONY: run
run: build ## run the service on the embedded store, keeping its data in DATA_DIR (.latticekeep)
	@exec $(BIN)/latticekeep server --dev --data-dir $(DATA_DIR)

.PHONY: test-unit
test-unit: ## run the tests that need nothing but Go: under three minutes on two cores once compiled
	go test -short -parallel 8 -ldflags='-s -w' ./... # many tests mostly wait, and a test program needs no symbols

.PHONY: deps
deps: control-plane helm prometheus versitygw poppler postgres strace chromium firefox curl python node ## compile and install what `make test` needs beside Go (as root: Debian packages)
	@command -v kubectl >/dev/null || { echo "kubectl is not on the PATH: install it first" >&2; exit 1; }

# Packages whose goroutines share state. The stores run whole, since -short leaves PostgreSQL out.
RACE := ./internal/audit/... ./internal/vault/... ./internal/keyring/... ./internal/identity/... ./internal/quota/... ./internal/transit/... ./server/gate/...

.PHONY: test
test: deps ## install what the tests need, run all of them, a real kube-apiserver included, then the race detector where state is shared
	@go build -o $(BIN)/tools/gotest ./hack/gotest
	@$(BIN)/tools/gotest -timeout $(TEST_TIMEOUT) ./...
	CGO_ENABLED=1 $(BIN)/tools/gotest -race -short -timeout $(TEST_TIMEOUT) $(RACE)
	CGO_ENABLED=1 $(BIN)/tools/gotest -race -timeout $(TEST_TIMEOUT) ./internal/store/...

.PHONY: test-race
test-race: helm prometheus versitygw poppler postgres strace chromium firefox curl python node ## run everything that needs no cluster under the race detector (half an hour; needs a C compiler)
	@go build -o $(BIN)/tools/gotest ./hack/gotest
	@CGO_ENABLED=1 exec $(BIN)/tools/gotest -race -timeout 60m ./...

# The last commit before names became paths, and policies came.
FORMER ?= 432ea44cc3766c05c7f0b91c3f4125e8b86d9835

.PHONY: former-client
former-client: ## run the Go client of the commit FORMER, and its tests, against the server of this one
	@hack/former-client.sh $(FORMER)

.PHONY: vuln
vuln: lint-tools ## check the dependencies against Go's vulnerability database, or say that it cannot be reached
	@hack/vuln.sh

.PHONY: cluster
cluster: build control-plane ## run a local control plane with the operator, prove the main job on it, stay up until interrupted
	@go build -o $(BIN)/tools/cluster ./hack/cluster
	@exec $(BIN)/tools/cluster $(BIN)/latticekeep

.PHONY: e2e
e2e: ## install the chart into a real cluster, E2E_KUBECONFIG or a node of its own (root on Linux), and write docs/e2e.md
	@exec hack/e2e.sh -transcript docs/e2e.md

.PHONY: external-secrets
external-secrets: control-plane ## compile External Secrets Operator, once, and follow its guide (minutes)
	@EXTERNAL_SECRETS=$$(hack/external-secrets.sh) && export EXTERNAL_SECRETS && go test -count=1 -v ./test/externalsecrets

.PHONY: control-plane
control-plane: ## compile kube-apiserver and etcd, once (or use those in KUBEBUILDER_ASSETS)
	@hack/control-plane.sh >/dev/null

.PHONY: tools
tools:
	@go -C hack/tools build -o $(BIN)/tools/ tool

# helm and kubeconform: a module of their own, since their dependencies would move those of the generators.
.PHONY: helm
helm:
	@go -C hack/helm build -o $(BIN)/tools/ tool

# The rules of Prometheus, with which tests evaluate the alerts.
.PHONY: prometheus
prometheus:
	@go -C hack/prometheus build -ldflags="-s -w" -o $(BIN)/tools/alerts .

# The S3 server that tests of object storage talk to.
.PHONY: versitygw
versitygw:
	@go -C hack/versitygw build -o $(BIN)/tools/ tool

# Tests that read PDF, drive the dashboard, or make system calls fail are skipped without these, and say so.
.PHONY: poppler chromium firefox strace
poppler:
	@hack/debian.sh pdftotext poppler-utils 'tests that read PDF will be skipped'
chromium:
	@hack/debian.sh chromium chromium 'tests of the dashboard in a browser will be skipped'
firefox:
	@hack/debian.sh firefox-esr firefox-esr 'the test of the dashboard in Firefox will be skipped'
strace:
	@hack/debian.sh strace strace 'tests in which system calls fail will be skipped'

# Some tests send what a page has readers send with it.
.PHONY: curl
curl:
	@hack/debian.sh curl curl 'some tests of internal/cli will fail'

# Debian's Python runs the tests of the client in Python. Commands on the PATH may be those of another one.
.PHONY: python
python:
	@hack/debian.sh /usr/bin/pytest-3 python3-pytest 'tests of the client in Python will be skipped'
	@hack/debian.sh /usr/bin/mypy mypy 'the types of the client in Python will not be checked'
	@hack/debian.sh /usr/bin/pyproject-build python3-build 'the wheel of the client in Python will not be built'
	@hack/debian.sh /usr/bin/hatchling python3-hatchling 'the wheel of the client in Python will not be built'

# The tests of the store on PostgreSQL start servers of their own; without it they are skipped, and say so.
.PHONY: postgres
postgres:
	@compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || command -v postgres >/dev/null || hack/postgres.sh

.PHONY: chaos
chaos: postgres strace prometheus ## kill, freeze and cut off replicas, databases, disks and the KMS for over an hour, and write docs/chaos.md (root, for a disk of its own that fills)
	@hack/chaos.sh docs/chaos.md '^Test(EveryAlertFires|Replicas|TheNetwork|Histories|AFullDisk|ADiskThatFails|AKMSOutage)' ./test/alerts ./test/chaos <hack/chaos.md

.PHONY: chaos-syscalls
chaos-syscalls: strace ## let each system call of a start and of changes fail once in every way, and write docs/chaos-syscalls.md (an hour)
	@hack/chaos.sh docs/chaos-syscalls.md '^TestEverySystemCallMayFail$$' ./test/chaos <hack/chaos-syscalls.md

.PHONY: memory-million
memory-million: ## serve 100,000 credentials in what the formula says, and back up, restore, export and verify a million entries in 128 MiB; write docs/evidence/memory-limit.md (root on Linux, an hour, 15 GB in the temporary folder)
	@hack/chaos.sh docs/evidence/memory-limit.md '^Test(ASmallServerServes|ALongLog)' <hack/memory-limit.md

.PHONY: vendor-web
vendor-web: ## make the dashboard's vendored files anew from the versions pinned in hack/web (node and npm)
	hack/vendor-web.sh

.PHONY: screenshots
screenshots: chromium ## take the pictures of every page of the dashboard, into bin/screenshots and those shown into docs/images
	@exec hack/screenshots.sh

.PHONY: docs-tools
docs-tools:
	@go -C hack/docs build -o $(BIN)/tools/ tool

.PHONY: docs
docs: docs-tools ## build the documentation as a site into bin/site, and check its links
	@BIN=$(BIN) hack/docs/build.sh

.PHONY: prose
prose: ## check the words of the documentation and of messages (needs a C compiler)
	BIN=$(BIN) hack/vale/check.sh
	hack/fragments.sh $(FRAGMENTS)

.PHONY: contract
contract: node ## check the contracts of the REST interface with Redocly and Spectral
	@BIN=$(BIN) hack/contract.sh

.PHONY: node
node:
	@hack/debian.sh node nodejs 'the client in TypeScript and the contracts will not be checked'
	@hack/debian.sh npm npm 'the client in TypeScript and the contracts will not be checked'

.PHONY: lint-tools
lint-tools:
	@go -C hack/lint build -o $(BIN)/tools/ tool

.PHONY: generate
generate: tools helm ## regenerate types, routes and the client in Python from the contracts; deep copies, CRD and roles from the markers in the code; config/ from the chart; pages of docs/reference
	$(BIN)/tools/oapi-codegen -config api/openapi/v1/oapi-codegen.yaml api/openapi/v1.yaml
	$(BIN)/tools/oapi-codegen -config api/openapi/v1/routes.yaml api/openapi/v1.yaml
	$(BIN)/tools/oapi-codegen -config api/openapi/v2/oapi-codegen.yaml api/openapi/v2.yaml
	$(BIN)/tools/oapi-codegen -config api/openapi/v2/routes.yaml api/openapi/v2.yaml
	go run -trimpath ./hack/pythonclient clients/python/src/latticekeep
	$(BIN)/tools/controller-gen object paths=./api/...
	$(BIN)/tools/controller-gen crd paths=./api/... output:crd:dir=config/crd/bases
	$(BIN)/tools/controller-gen rbac:roleName=latticekeep-operator paths=./controllers/... output:rbac:dir=config/rbac
	BIN=$(BIN) hack/render-chart.sh
	go run -trimpath ./hack/reference docs/reference

.PHONY: man
man: ## write manual pages of all commands into bin/man, dated by the commit
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) go run ./hack/reference -man $(BIN)/man

.PHONY: verify
verify: tools helm lint-tools docs-tools contract ## check what is generated, the chart and config/, formatting, vet, lint, imports, the benchmark and go.mod files
	BIN=$(BIN) hack/verify-generated.sh
	BIN=$(BIN) hack/verify-chart.sh
	@files=$$(gofmt -l $$(git ls-files --cached --others --exclude-standard '*.go')); \
	if [[ -n "$$files" ]]; then echo "not formatted; run gofmt -w on:" >&2; echo "$$files" >&2; exit 1; fi
	go vet ./...
	$(BIN)/tools/golangci-lint run
	$(BIN)/tools/actionlint
	@$(MAKE) --no-print-directory prose
	go test -count=1 -run '^Test(Imports|House|WireStrings)' .
	@$(BUILD) -o $(BIN)/latticekeep . && go build -o $(BIN)/tools/bench ./hack/bench
	@hack/verify-size.sh $(BIN)/latticekeep
	@# The least shares are six tenths of those in docs/benchmarks.md.
	@$(BIN)/tools/bench -latticekeep $(BIN)/latticekeep -part embedded -signing entry -rounds 3 -time 2s -syncs=false \
	    -least encrypt=0.37 -least seal=0.32
	@# All parts have to run, postgres where make postgres has installed it. What so short a run measures says nothing.
	@$(BIN)/tools/bench -latticekeep $(BIN)/latticekeep -rounds 1 -time 200ms -warm 50ms -credentials 1100 -kms-operations 100 -syncs=false \
	    -part embedded,growth,kms,overload,logins$$(compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null && echo ,postgres) >/dev/null
	@for module in $(MODULES); do echo "go mod tidy -diff ($$module)"; go -C $$module mod tidy -diff; done

.PHONY: fuzz
# Minimising an input of several KiB would take all of the time, and can outlast it.
fuzz: ## run every fuzz target for FUZZTIME (30s) each
	@grep -roE --include='*_test.go' '^func Fuzz[A-Za-z0-9_]*' api controllers internal server test | \
	while IFS=: read -r file target; do \
	    echo "$$file $$target"; \
	    go test -run '^$$' -fuzz "^$${target#func }\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 1x "./$$(dirname "$$file")" </dev/null; \
	done

.PHONY: memory
memory: build ## count how often a plaintext is in the memory of a server, as in docs/evidence/memory.md (Linux, root)
	@go build -o $(BIN)/tools/memscan ./hack/memscan
	@$(BIN)/tools/memscan -latticekeep $(BIN)/latticekeep

.PHONY: bench
bench: build ## drive the built server over loopback and print docs/benchmarks.md's tables; BENCH="-part embedded -rounds 3" chooses
	@go build -o $(BIN)/tools/bench ./hack/bench
	@exec $(BIN)/tools/bench -latticekeep $(BIN)/latticekeep $(BENCH)

.PHONY: bench-million
bench-million: build ## the same with a million credentials beside a thousand (a quarter of an hour, 20 GB in the temporary folder)
	@go build -o $(BIN)/tools/bench ./hack/bench
	@exec $(BIN)/tools/bench -latticekeep $(BIN)/latticekeep -part growth -credentials 1000000 $(BENCH)

.PHONY: bench-growth
bench-growth: postgres ## measure what a read takes for good: GROWTH reads (3000000; hours, 16 GB in the temporary folder) in the embedded store, 200,000 in PostgreSQL
	go test -run '^$$' -bench 'Growth$$' -benchtime $(GROWTH)x -timeout 0 ./internal/audit/keeper
	go test -run '^$$' -bench GrowthPostgres -benchtime 200000x -timeout 0 ./internal/audit/keeper

.PHONY: bench-primitives
bench-primitives: ## run the benchmarks of single packages that docs/benchmarks.md publishes
	go test -run '^$$' -bench . -benchtime $(BENCHTIME) -p 1 ./internal/envelope ./internal/dualsig ./internal/audit/... ./internal/vault ./internal/identity ./internal/compliance/...

.PHONY: bench-log
bench-log: ## measure queries and starts at a million entries, and the verification of LATTICEKEEP_BENCH_ENTRIES (minutes, 3 GB in the temporary folder)
	LATTICEKEEP_BENCH_ENTRIES=1000000 go test -run '^$$' -bench 'Query|Start' -benchtime 100x -timeout 30m ./internal/audit/reader ./internal/audit/verify
	GOGC=400 LATTICEKEEP_BENCH_ENTRIES=$${LATTICEKEEP_BENCH_ENTRIES:-150000} go test -run '^$$' -bench 'Verify' -benchtime 2x -timeout 60m ./internal/audit/verify

.PHONY: bench-operator
bench-operator: control-plane ## make 2,000 SealedCredentials ready on a real API server and restart with them settled, as ratios (minutes)
	go test -run '^$$' -bench Operator -benchtime 1x -timeout 30m ./controllers

.PHONY: bench-timing
bench-timing: ## compare how long unseals and sign-ins of different kinds take, 2,000 each (minutes)
	go test -run '^$$' -bench Timing -benchtime 1x -timeout 30m -p 1 ./internal/vault ./internal/identity

.PHONY: bench-dashboard
bench-dashboard: chromium ## measure the time until pages of the dashboard show their content, and read a log of a million entries (a quarter of an hour)
	go test -run '^$$' -bench Paint -benchtime 20x ./server/dashboard
	DASHBOARD_ENTRIES=1000000 DASHBOARD_CREDENTIALS=10000 go test -v -count=1 -timeout 60m -run 'LongLists|ALongLog' ./server/dashboard

.PHONY: clean
clean: ## remove everything that make compiled
	rm -rf $(BIN)
