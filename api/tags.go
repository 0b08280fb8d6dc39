package api

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Tags are key=value pairs that a producer gives a group, such as campaign=spring, by which the
// group is found. They never change.
type Tags map[string]string

// These limits bound the tags of a group.
const (
	MaxTags       = 8
	maxTagKeySize = 64
	maxTagSize    = 128 // bytes of a value
)

// TagRule is the end of an error message about a tag: "must " + TagRule.
const TagRule = "be KEY=VALUE with a key that matches ^[A-Za-z0-9._-]{1,64}$ (except . and ..) and a value of 1 to 128 " +
	"bytes of UTF-8 without control characters"

// ValidTag reports whether a tag follows TagRule.
func ValidTag(key, value string) bool {
	return len(key) <= maxTagKeySize && ValidID(key) && value != "" && len(value) <= maxTagSize &&
		utf8.ValidString(value) && !strings.ContainsFunc(value, unicode.IsControl)
}

// Pairs returns the tags as KEY=VALUE, sorted.
func (t Tags) Pairs() []string {
	if len(t) == 0 {
		return nil
	}
	pairs := make([]string, 0, len(t))
	for key, value := range t {
		pairs = append(pairs, key+"="+value)
	}
	slices.Sort(pairs)
	return pairs
}

// Include reports whether all of these tags are among t.
func (t Tags) Include(all Tags) bool {
	for key, value := range all {
		if t[key] != value {
			return false
		}
	}
	return true
}

// ParseTags parses tags of the form KEY=VALUE, each of another key; nil if there are none. Its error
// says what they must be, without their text.
func ParseTags(pairs []string) (Tags, error) {
	if len(pairs) == 0 {
		return nil, nil
	}
	if len(pairs) > MaxTags {
		return nil, fmt.Errorf("must be given at most %d times", MaxTags)
	}
	tags := make(Tags, len(pairs))
	for _, pair := range pairs {
		key, value, _ := strings.Cut(pair, "=")
		if !ValidTag(key, value) {
			return nil, errors.New("must " + TagRule)
		}
		if tags[key] != "" {
			return nil, errors.New("must name each key once")
		}
		tags[key] = value
	}
	return tags, nil
}
