//go:build !linux

package main

import "time"

func sleepUntil(t time.Time) { <-time.After(time.Until(t)) }
