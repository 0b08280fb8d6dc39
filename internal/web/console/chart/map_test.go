package chart_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/web/console/chart"
)

func TestMap(t *testing.T) {
	t.Parallel()
	done := func(done, failed int64) []chart.Value {
		return []chart.Value{{Name: "done", Class: "d", Number: done}, {Name: "failed", Class: "f", Number: failed}}
	}
	m := chart.NewMap(400, 50, [][]chart.Value{done(10, 0), done(10, 0), done(5, 5), done(0, 0)})
	require.Equal(t, chart.Map{Width: 400, Height: 50, Areas: []chart.Area{
		{Name: "done", Class: "d", Path: "M0 0h200v50h-200zM200 25h100v25h-100z"},
		{Name: "failed", Class: "f", Path: "M200 0h100v25h-100z"},
	}}, m)
	require.Empty(t, chart.NewMap(400, 50, nil).Areas)

	rare := chart.NewMap(400, 50, [][]chart.Value{done(1_000_000, 1)})
	require.Equal(t, "M0 0h400v3h-400z", rare.Areas[1].Path, "one failed job among a million can be seen")

	var many [][]chart.Value
	for range 500 {
		many = append(many, done(3, 1))
	}
	even := chart.NewMap(1000, 48, many)
	require.Equal(t, 1, strings.Count(even.Areas[0].Path, "M"))
}
