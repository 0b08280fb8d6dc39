package lua_test

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/bulkaction/bulkaction/lua"
)

// actReduce reads results, or takes those of before, and reduces some of them together into one of two slots.
func (m *model) actReduce() {
	m.results = append(m.results, m.readResults(2)...)
	for _, e := range some(m, m.results, 2) {
		slot := rapid.SampledFrom([]string{"0", "1"}).Draw(m.rt, "slot")
		before := m.states(e.group)
		if m.chance("with an old version") {
			r := m.reduce(lua.ReduceArgs{Group: e.group, Slot: slot, Version: 1000, State: []byte("0"), Entries: []string{e.entry}, Ordinals: e.ordinals})
			require.Equal(m, lua.ReduceVersion, r.State)
			continue
		}
		r := m.reduceInto(slot, e)
		if r.State == lua.ReduceBad { // what an aggregator does: it leaves them out
			require.Equal(m, before, m.states(e.group))
			e.ordinals = slices.DeleteFunc(slices.Clone(e.ordinals), func(n int64) bool { return slices.Contains(r.Bad, n) })
			e.lines = ""
			for i, n := range e.ordinals {
				e.lines += strings.Repeat("\n", min(i, 1)) + fmt.Sprintf(`{"ordinal":%d}`, n)
			}
			r = m.reduceInto(slot, e)
		}
		require.Equal(m, lua.ReduceOK, r.State)
	}
}

func (m *model) actCancel() {
	if m.chance("really") && m.chance("yes") {
		_ = lua.Cancel(m.Context(), m.c, m.p, m.group()) // refused when it has ended
	}
}

func (m *model) actSweep() {
	_, err := lua.Sweep(m.Context(), m.c, m.p, m.group())
	require.NoError(m, err)
}

func (m *model) actRetry() {
	g := m.group()
	if _, err := m.reopen(g); err == nil && !m.chance("stop there") {
		m.requeue(g)
	}
}

// actPause pauses or resumes a group, a tenant or a type.
func (m *model) actPause(do switching) {
	if !m.chance("really") {
		return
	}
	switch rapid.SampledFrom([]lua.Pausable{lua.PauseGroup, lua.PauseTenant, lua.PauseType}).Draw(m.rt, "what") {
	case lua.PauseGroup:
		_ = do(m.Context(), m.c, m.p, lua.PauseGroup, m.group()) // refused when it has ended
	case lua.PauseTenant:
		require.NoError(m, do(m.Context(), m.c, m.p, lua.PauseTenant, rapid.SampledFrom(owners).Draw(m.rt, "tenant")))
	case lua.PauseType:
		require.NoError(m, do(m.Context(), m.c, m.p, lua.PauseType, m.typ()))
	}
}

// actSet gives a tenant other settings, or none.
func (m *model) actSet() {
	if !m.chance("really") {
		return
	}
	var s lua.TenantSettings
	if m.chance("weight") {
		s = weight(rapid.SampledFrom([]float64{0.001, 0.25, 1, 3, 1000}).Draw(m.rt, "weight"))
	}
	if m.chance("rps") {
		s.RPS = perWindow(float64(m.upTo(3) + 1)).RPS
	}
	if m.chance("base priority") {
		base := int64(m.upTo(100_000))
		s.BasePriority = &base
	}
	m.set(rapid.SampledFrom(owners).Draw(m.rt, "tenant"), s)
}

// freely lets everything go on as if nobody had ever interfered.
func (m *model) freely() {
	for _, g := range m.groups() {
		_ = lua.Resume(m.Context(), m.c, m.p, lua.PauseGroup, g) // refused when it has ended
	}
	for _, tenant := range owners {
		m.resume(lua.PauseTenant, tenant)
		m.set(tenant, lua.TenantSettings{})
	}
	for _, typ := range types {
		m.resume(lua.PauseType, typ)
	}
}
