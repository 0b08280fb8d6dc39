package app

import (
	"cmp"
	"slices"
	"strings"
)

// others are variables of the command line, the tests and the harness, which share the prefix.
var others = []string{"BULKACTION_API", "BULKACTION_REDIS_SERVER", "BULKACTION_TEST_BIN"}

// unknown lists what is set but not read, by name.
func unknown(set map[string]string, variables []Variable) []Unknown {
	var names []string
	for _, v := range variables {
		names = append(names, v.Name)
	}
	var found []Unknown
	for name := range set {
		if !slices.Contains(names, name) && !slices.Contains(others, name) {
			found = append(found, Unknown{Name: name, DidYouMean: nearest(name, names)})
		}
	}
	slices.SortFunc(found, func(a, b Unknown) int { return cmp.Compare(a.Name, b.Name) })
	return found
}

// nearest is the name that is a few letters away, or that only has a section's name in front of
// what was written.
func nearest(name string, names []string) string {
	own := strings.TrimPrefix(name, envPrefix)
	best, least := "", len(own)/4+1
	for _, candidate := range names {
		other := strings.TrimPrefix(candidate, envPrefix)
		d := distance(own, other)
		if own != "" && strings.HasSuffix(other, "_"+own) {
			d = 1
		}
		if d < least || d == least && best == "" {
			best, least = candidate, d
		}
	}
	return best
}

// distance is Levenshtein's: the fewest letters to insert, delete or replace to get from a to b.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replace := diagonal
			if a[i] != b[j] {
				replace++
			}
			diagonal = row[j+1]
			row[j+1] = min(replace, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
