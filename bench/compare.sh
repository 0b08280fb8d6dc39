#!/usr/bin/env bash
# Compares the speed of the working tree with that of another revision: Go benchmarks through benchstat, and `bench throughput` of both
# programs in turn, whose medians and ratios it prints. Only flags that every revision's bench knows are used.
#   BASE=rev [ROUNDS=3] [JOBS=100000] [COUNT=6] [PKGS="./a ./b"] bench/compare.sh
set -euo pipefail
cd "$(dirname "$0")/.."

BASE=${BASE:-}
ROUNDS=${ROUNDS:-3}
JOBS=${JOBS:-100000}
COUNT=${COUNT:-6}
# The packages of the hot path that have benchmarks; those that BASE lacks are left out there.
PKGS=${PKGS:-./lua ./internal/ledger ./reducer ./processor/noop ./internal/messages ./internal/redisx ./internal/telemetry ./internal/stage/...}
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

for side in base head; do
	dir=.
	[ "$side" = base ] && dir=$tmp/base
	(cd "$dir" && go build -o "$tmp/bulkaction-$side" ./cmd/bulkaction)
	: >"$tmp/$side.txt"
done

# benchmarks SIDE DIR runs each benchmark once, so that both sides can take turns.
benchmarks() {
	local packages=() p
	for p in $PKGS; do
		[ -d "$2/${p%/...}" ] && packages+=("$p")
	done
	(cd "$2" && go test -run '^$' -bench . -benchmem -benchtime "${BENCHTIME:-200ms}" "${packages[@]}") >>"$tmp/$1.txt" || {
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
	(cd "$tmp" && go run "$BENCHSTAT" base.txt head.txt)
fi

[ "$ROUNDS" -gt 0 ] || exit 0
figures='jobs_per_second redis_cpu_us_per_job process_cpu_us_per_job redis_commands_per_job redis_bytes_per_queued_job'
for ((i = 1; i <= ROUNDS; i++)); do
	for side in base head; do
		echo "throughput of $side, $i of $ROUNDS" >&2
		"$tmp/bulkaction-$side" bench throughput --jobs "$JOBS" --json >"$tmp/run.json"
		for name in $figures; do
			sed -n "s/.*\"$name\":\([0-9.eE+-]*\).*/\1/p" "$tmp/run.json" >>"$tmp/$side.$name"
		done
	done
done

median() { sort -g "$1" | awk '{v[NR] = $1} END {print NR ? (NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2) : 0}'; }
printf '\n%-28s %12s %12s %8s   (medians of %d)\n' throughput "${BASE:0:12}" head ratio "$ROUNDS"
for name in $figures; do
	awk -v n="$name" -v a="$(median "$tmp/base.$name")" -v b="$(median "$tmp/head.$name")" \
		'BEGIN {printf "%-28s %12.2f %12.2f %8.3f\n", n, a, b, a ? b / a : 0}'
done
