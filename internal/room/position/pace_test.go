package position

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

func TestPace(t *testing.T) {
	t.Parallel()
	type step struct {
		second, promoted int64
		mode             string
		used             int64 // of 10 slots
	}
	for name, c := range map[string]struct {
		steps []step
		want  float64 // negative: unknown
	}{
		"nothing":                  {nil, -1},
		"one snapshot":             {[]step{{0, 5, api.ModeOpen, 0}}, -1},
		"too short":                {[]step{{0, 5, api.ModeOpen, 0}, {2, 500, api.ModeOpen, 0}}, -1},
		"ten a second":             {[]step{{0, 5, api.ModeOpen, 0}, {1, 5, api.ModeOpen, 0}, {10, 105, api.ModeOpen, 0}}, 10},
		"nobody":                   {[]step{{0, 5, api.ModeOpen, 0}, {10, 5, api.ModeOpen, 0}}, 0},
		"only the last minute":     {[]step{{0, 0, api.ModeOpen, 0}, {20, 1000, api.ModeOpen, 0}, {80, 1060, api.ModeOpen, 0}}, 1},
		"paused":                   {[]step{{0, 5, api.ModeOpen, 0}, {10, 105, api.ModePaused, 0}}, -1},
		"sold out":                 {[]step{{0, 5, api.ModeOpen, 0}, {10, 105, api.ModeSoldOut, 0}}, -1},
		"just resumed":             {[]step{{0, 5, api.ModeOpen, 0}, {10, 105, api.ModePaused, 0}, {11, 105, api.ModeOpen, 0}}, -1},
		"resumed":                  {[]step{{0, 5, api.ModeOpen, 0}, {10, 105, api.ModePaused, 0}, {20, 105, api.ModeOpen, 0}, {25, 115, api.ModeOpen, 0}}, 2},
		"Redis lost data":          {[]step{{0, 500, api.ModeOpen, 0}, {10, 400, api.ModeOpen, 0}, {14, 404, api.ModeOpen, 0}}, 1},
		"the first fill the slots": {[]step{{0, 0, api.ModeOpen, 0}, {1, 10, api.ModeOpen, 10}, {10, 10, api.ModeOpen, 10}}, 0},
		"and others follow":        {[]step{{0, 0, api.ModeOpen, 0}, {1, 10, api.ModeOpen, 10}, {10, 15, api.ModeOpen, 10}}, 0.5},
		"limited by the rate":      {[]step{{0, 0, api.ModeOpen, 0}, {5, 5, api.ModeOpen, 5}}, 1},
		"a slot is free for a moment": {
			[]step{{0, 20, api.ModeOpen, 10}, {5, 30, api.ModeOpen, 9}, {10, 40, api.ModeOpen, 9}}, 2,
		},
		"Redis's clock went back": {[]step{{100, 500, api.ModeOpen, 0}, {10, 600, api.ModeOpen, 0}}, -1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var p pace
			for _, s := range c.steps {
				p.add(time.Unix(1_700_000_000+s.second, 0), waitingroom.Snapshot{
					Settings: waitingroom.Settings{Mode: s.mode}, Counters: map[string]int64{"promoted": s.promoted},
					Used: s.used, Free: 10 - s.used,
				})
			}
			got, ok := p.perSecond()
			require.Equal(t, c.want >= 0, ok)
			require.InDelta(t, max(c.want, 0), got, 1e-9)
		})
	}
}

func TestETA(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		place Place
		want  float64
		ok    bool
	}{
		"known":        {Place{Position: 30, pace: 4}, 7.5, true},
		"pace unknown": {Place{Position: 30}, 0, false},
		"left":         {Place{Left: true, pace: 4}, 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, ok := c.place.ETA()
			require.Equal(t, c.ok, ok)
			require.InDelta(t, c.want, got, 1e-9)
		})
	}
}
