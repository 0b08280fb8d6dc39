package audit

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/bulkaction/bulkaction/internal/audit/read"
	"github.com/bulkaction/bulkaction/internal/redisx"
	"github.com/bulkaction/bulkaction/internal/redisx/keyspace"
)

// Receipts holds, by group, how many jobs its producer was told were accepted.
type Receipts map[string]int64

// ReadReceipts reads receipts, one JSON object per line: {"group": …, "accepted": n}. If a group
// has several, the largest number counts. Empty lines are skipped.
func ReadReceipts(from io.Reader) (Receipts, error) {
	all := Receipts{}
	lines, n := bufio.NewScanner(from), 1
	for ; lines.Scan(); n++ {
		if len(lines.Bytes()) == 0 {
			continue
		}
		var r struct {
			Group    string
			Accepted *int64
		}
		if err := json.Unmarshal(lines.Bytes(), &r); err != nil || r.Group == "" || r.Accepted == nil ||
			*r.Accepted < 0 {
			return nil, fmt.Errorf(`line %d: {"group": "…", "accepted": n} is expected`, n)
		}
		all[r.Group] = max(all[r.Group], *r.Accepted)
	}
	switch err := lines.Err(); {
	case errors.Is(err, bufio.ErrTooLong):
		return nil, fmt.Errorf("line %d: it is longer than %d bytes, no receipt is", n, bufio.MaxScanTokenSize)
	case err != nil:
		return nil, err
	}
	return all, nil
}

// Check adds a violation of the law receipt for each group that does not exist or holds fewer jobs
// than its receipt says. Redis has then lost them, by a cut of its append-only file or because a
// lagging replica became master. A group that has expired in between looks the same.
func (all Receipts) Check(ctx context.Context, conn *redisx.Conn, space keyspace.Space, report *Report) error {
	r := read.Reader{Cmd: conn.Cmd}
	var keys []string
	for _, id := range slices.Sorted(maps.Keys(all)) {
		keys = append(keys, space.OfGroup(id).Owner(id))
	}
	owners, err := readOwnerKeys(ctx, r, keys)
	if err != nil {
		return fmt.Errorf("check receipts: %w", err)
	}
	held, err := readGroupField(ctx, r, space, owners, "accepted")
	if err != nil {
		return fmt.Errorf("check receipts: %w", err)
	}
	var found []Violation
	for i, k := range owners {
		v := Violation{Law: LawReceipt, Partition: space.OfGroup(k.group).Index(), Group: k.group}
		told, have := all[k.group], read.Int(held[i].Val())
		switch {
		case !k.exists:
			v.Detail = fmt.Sprintf("%d jobs are missing: there is no such group", told)
		case have < told:
			v.Partition = space.OfTenant(k.tenant).Index()
			v.Detail = fmt.Sprintf("%d jobs are missing: it holds %d of the %d that its producer was told",
				told-have, have, told)
		default:
			continue
		}
		found = append(found, v)
	}
	report.Add(found...)
	return nil
}
