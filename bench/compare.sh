#!/usr/bin/env bash
# Compares the speed of the working tree with that of another revision, BASE=rev:
# - the Go benchmarks of the hot path through benchstat; COUNT=0 leaves them out
#     COUNT=6 PKGS="./a ./b" BENCHTIME=200ms
# - both programs under the same workload, in turn (`go run . compare`); ROUNDS=0: not
#     ROUNDS=5 VARIANTS="base http" JOBS=300000 HTTP_JOBS=10000 SMALL_GROUPS=20000 LONE=100 EXPIRE=1 RATE=100 LATENCY_SECONDS=5
#     OUT=file.json
set -euo pipefail
cd "$(dirname "$0")/.."

BASE=${BASE:-}
COUNT=${COUNT:-6}
ROUNDS=${ROUNDS:-5}
# The packages that have benchmarks of the hot path; each side runs those that it has.
PKGS=${PKGS:-./lua/... ./internal/jobs/ledger/... ./reducer/... ./processor/noop ./internal/messages/...
	./internal/redisx/... ./internal/jobs/groups/... ./internal/web/httpapi/... ./internal/telemetry/... ./internal/stage/...}
BENCHSTAT=golang.org/x/perf/cmd/benchstat@v0.0.0-20260908200009-22c9c6c9d4da
export GOFLAGS="${GOFLAGS:-} -buildvcs=false"

if [ -z "$BASE" ]; then
	echo "compare: say with what: make bench-compare BASE=main" >&2
	exit 2
fi
rev=$(git rev-parse --verify --quiet "$BASE^{commit}") || {
	echo "compare: there is no revision $BASE" >&2
	exit 2
}

tmp=$(mktemp -d)
cleanup() {
	git worktree remove --force "$tmp/base" >/dev/null 2>&1 || true
	git worktree prune
	rm -rf "$tmp"
}
trap cleanup EXIT
trap 'exit 130' INT TERM
git worktree add --quiet --detach "$tmp/base" "$rev"

# benchmarks SIDE DIR runs each benchmark of the tree DIR once, so that both sides can take turns,
# and adds the output to SIDE.txt.
benchmarks() {
	local packages=() p
	for p in $PKGS; do
		[ -d "$2/${p%/...}" ] && packages+=("$p")
	done
	(cd "$2" && go test -run '^$' -bench . -benchmem -benchtime "${BENCHTIME:-200ms}" "${packages[@]}") \
		>>"$tmp/$1.txt" || {
		tail -n 20 "$tmp/$1.txt" >&2
		exit 1
	}
}

if [ "$COUNT" -gt 0 ]; then
	for ((i = 1; i <= COUNT; i++)); do
		echo "benchmarks, $i of $COUNT" >&2
		benchmarks base "$tmp/base"
		benchmarks head .
	done
	awk -f bench/common.awk "$tmp"/{base,head,base,head}.txt
	(cd "$tmp" && go run "$BENCHSTAT" base=base.txt.common head=head.txt.common)
fi

[ "$ROUNDS" -gt 0 ] || exit 0
name=${rev:0:12} # heads the column of the table
(cd "$tmp/base" && go build -o "$tmp/bin/$name" ./cmd/bulkaction)
go build -o "$tmp/bin/head" ./cmd/bulkaction
(cd bench && go build -o "$tmp/bin/bench" .)
variants=${VARIANTS:-}
echo "compare: $name with the working tree, $ROUNDS rounds of ${variants:-all variants}" >&2
BULKACTION_BENCH_BIN="$tmp/bin/head" "$tmp/bin/bench" compare "$tmp/bin/$name" --rounds "$ROUNDS" ${variants:+--only "${variants// /,}"} \
	${JOBS:+--jobs "$JOBS"} ${HTTP_JOBS:+--http-jobs "$HTTP_JOBS"} \
	${SMALL_GROUPS:+--groups "$SMALL_GROUPS"} ${LONE:+--lone "$LONE"} ${EXPIRE:+--expire} \
	${RATE:+--rate "$RATE"} ${LATENCY_SECONDS:+--seconds "$LATENCY_SECONDS"} ${OUT:+--out "$OUT"}
