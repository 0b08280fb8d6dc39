//go:build !linux

package main

import "time"

// sleepUntil sleeps until t.
func sleepUntil(t time.Time) { <-time.After(time.Until(t)) }
