//go:build chaoscontrol

package lua

import (
	"fmt"
	"os"
	"strings"
)

// edit is a change of a script's source: instead replaces guard, a text that keeps a rule.
type edit struct{ script, guard, instead string }

// controls are edits that break a rule of the scripts on purpose, by the name of the control. The
// chaos tests apply one at a time, to prove that they would notice it.
var controls = map[string][]edit{
	// With this control a report counts, whatever became of its attempt meanwhile.
	"attempt": {
		{"outcome", "local mine = live and states[i] == 'I' .. m\n", "local mine = live and states[i] ~= ''\n"},
		{
			"outcome",
			"local mine = live and (state == (kind == 'u' and 'R' or 'I') .. m or kind == 'd' and state == 'R' .. m)\n",
			"local mine = live and state ~= ''\n",
		},
	},
	// With this control an append that is asked again is applied again.
	"retry": {
		{"append", "if mode ~= '' and g[10] then return { 'DUP' } end\n", ""},
		{"append", "if piece and piece < tonumber(g[11] or 0) then return { 'DUP' } end\n", ""},
		{
			"append",
			"if request ~= '' and not piece and (applied[request] or call('ZSCORE', known, request)) " +
				"then return { 'DUP' } end\n",
			"",
		},
	},
	// With this control an entry leaves its stream before its job has run.
	"order": {
		{"start", "local all = g[1] and", "local all = false and g[1] and"},
		{"start", "new[i] = 'I' .. mark(token)", "new[i], gone[#gone + 1] = 'I' .. mark(token), entries[i]"},
	},
}

// guarded returns the source of the script with this name (without folder), with the edits of the
// control that BULKACTION_CHAOS_CONTROL names; unchanged if that is empty. It panics if there is no
// such control, or if the source does not hold the text of an edit exactly once.
func guarded(name, src string) string {
	control := os.Getenv("BULKACTION_CHAOS_CONTROL")
	edits, known := controls[control]
	if !known && control != "" {
		panic(fmt.Sprintf("lua: no control %q", control))
	}
	for _, e := range edits {
		if e.script != name {
			continue
		}
		if strings.Count(src, e.guard) != 1 {
			panic(fmt.Sprintf(
				"lua: control %s: %s.lua does not hold %q once: the guard has moved, so let the control follow",
				control, name, e.guard,
			))
		}
		src = strings.Replace(src, e.guard, e.instead, 1)
	}
	return src
}
