package app

import (
	"cmp"
	"slices"
	"strings"
)

// others are variables with the prefix BULKACTION_ that no section reads: the command line and the
// tests do. They are not reported as unknown.
var others = []string{
	"BULKACTION_API", "BULKACTION_API_KEY", "BULKACTION_API_KEY_FILE",
	"BULKACTION_CA_FILE", "BULKACTION_CERT_FILE", "BULKACTION_KEY_FILE",
	"BULKACTION_REDIS_SERVER", "BULKACTION_TEST_BIN",
}

// unknown returns the variables that are set but that no section reads, without others, ordered by
// name.
func unknown(set map[string]string, variables []Variable) []Unknown {
	var names []string
	for _, v := range variables {
		names = append(names, v.Name)
		if v.File != "" {
			names = append(names, v.File)
		}
	}
	var found []Unknown
	for name := range set {
		if !slices.Contains(names, name) && !slices.Contains(others, name) {
			found = append(found, Unknown{Name: name, DidYouMean: Nearest(name, names)})
		}
	}
	slices.SortFunc(found, func(a, b Unknown) int { return cmp.Compare(a.Name, b.Name) })
	return found
}

// Nearest returns the known name that is most similar to an unknown name. Two names are similar if
// they differ in at most a quarter of the letters and one, or if the unknown name only lacks the
// first words, such as the prefix of a section. Nearest returns "" if no known name is similar.
func Nearest(name string, names []string) string {
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

// distance returns the Levenshtein distance: the smallest number of letters to insert, delete or
// replace to change a into b.
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
