// Package apivalue converts times and numbers to the form that the API's answers about groups and
// tenants have. It hides how they are rounded.
package apivalue

import (
	"math"
	"time"
)

// Latest returns the latest of the times.
func Latest(first time.Time, more ...time.Time) time.Time {
	for _, at := range more {
		if at.After(first) {
			first = at
		}
	}
	return first
}

// TimeIfAfter returns at in UTC and whole milliseconds if it is after now, otherwise nil.
func TimeIfAfter(at, now time.Time) *time.Time {
	if !at.After(now) {
		return nil
	}
	at = at.Truncate(time.Millisecond).UTC()
	return &at
}

// Round rounds v to a multiple of 1/parts.
func Round(v, parts float64) float64 { return math.Round(v*parts) / parts }
