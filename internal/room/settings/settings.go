// Package settings checks the settings of events of the waiting room, and fills in the defaults of
// missing ones. It is the one place that knows their bounds.
package settings

import (
	"cmp"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// Bounds of the settings that are numbers, and of the length of return_url.
const (
	MaxCapacity = 10_000_000 // also of stock
	maxWaiting  = 100_000_000
	maxBurst    = 1_000_000
	minRate     = 0.001
	maxRate     = 1_000_000
	maxURL      = 2048 // bytes
)

// Values of on_close and no_show.
const (
	Keep    = "keep"
	Wait    = "wait"
	Release = "release"
)

// Standard returns the defaults of an installation whose variables BROKER_* are not set.
func Standard() waitingroom.Settings {
	return waitingroom.Settings{
		MaxWaiting: 1_000_000,
		TokenTTL:   5 * time.Minute,
		Leeway:     10 * time.Second,
		MaxSession: 15 * time.Minute,
		Ready:      30 * time.Second,
		Grace:      time.Minute,
		OnClose:    Keep,
		NoShow:     Wait,
		Retention:  24 * time.Hour,
	}
}

// Rules check settings and fill in defaults.
type Rules struct {
	// Defaults are the values of settings that an event does not give, from the variables BROKER_*.
	// Its capacity, stock, rate, burst, mode and return_url are not used: there, only burst has a
	// default, which follows from the rate.
	Defaults waitingroom.Settings
	// ReturnHosts are the hosts that a return_url may have: HOST for any port, or HOST:PORT for
	// this port only. Loopback addresses are always allowed.
	ReturnHosts []string
	// Seats says that a seat service is configured: then settings may omit the capacity.
	Seats bool
}

// durations lists the settings that are a length of time, with their bounds.
var durations = []struct {
	name     string
	of       func(*api.EventSettings) *api.Duration
	min, max time.Duration
	rule     string
}{
	{
		"token_ttl", func(s *api.EventSettings) *api.Duration { return s.TokenTTL },
		time.Second, 24 * time.Hour, "1s to 24h",
	},
	{
		"leeway", func(s *api.EventSettings) *api.Duration { return s.Leeway },
		0, 5 * time.Minute, "0s to 5m",
	},
	{
		"max_session", func(s *api.EventSettings) *api.Duration { return s.MaxSession },
		0, 720 * time.Hour, "0s (no limit) to 720h",
	},
	{
		"ready", func(s *api.EventSettings) *api.Duration { return s.Ready },
		100 * time.Millisecond, 24 * time.Hour, "100ms to 24h",
	},
	{
		"grace", func(s *api.EventSettings) *api.Duration { return s.Grace },
		0, 24 * time.Hour, "0s (the place ends with the stream) to 24h",
	},
	{
		"retention", func(s *api.EventSettings) *api.Duration { return s.Retention },
		0, 8760 * time.Hour, "0s to 8760h",
	},
}

// Check returns one error for each bad field of an event's settings, always in the same order; nil
// if all are good.
func (r Rules) Check(set api.EventSettings) []api.FieldError {
	var c checks
	if set.Capacity == nil && !r.Seats {
		c.add("capacity", "is required: a whole number from 0 to 10,000,000. Without it BULKACTION_BROKER_SEATS_URL "+
			"must name a service that knows the number")
	}
	c.count("capacity", set.Capacity)
	c.count("stock", set.Stock)
	// written so that NaN is refused
	if set.Rate != nil && !(*set.Rate >= minRate && *set.Rate <= maxRate) {
		c.add("rate", "must be a number from 0.001 to 1,000,000 admissions a second; without a limit leave it out, to "+
			"stop admissions set mode to paused")
	}
	switch {
	case set.Burst < 0 || set.Burst > maxBurst:
		c.add("burst", "must be a whole number from 0 (the admissions of one second) to 1,000,000")
	case set.Burst > 0 && set.Rate == nil:
		c.add("burst", "needs rate")
	}
	if n := set.MaxWaiting; n != nil && (*n < 0 || *n > maxWaiting) {
		c.add("max_waiting", "must be a whole number from 0 to 100,000,000")
	}
	for _, d := range durations {
		v := d.of(&set)
		if v == nil {
			continue
		}
		switch got := time.Duration(*v); {
		case got < d.min || got > d.max:
			c.add(d.name, "must be "+d.rule)
		case got%time.Millisecond != 0:
			c.add(d.name, "must be whole milliseconds")
		}
	}
	c.oneOf("on_close", set.OnClose, Keep, Release)
	c.oneOf("no_show", set.NoShow, Wait, Release)
	c.oneOf("mode", set.Mode, api.ModeOpen, api.ModePaused, api.ModeClosed, api.ModeSoldOut)
	if set.ReturnURL != "" {
		if problem := r.checkURL(set.ReturnURL); problem != "" {
			c.add("return_url", problem)
		}
	}
	return c.bad
}

// CheckRecalibration returns one error for each bad field of a recalibration; nil if all are good.
func (r Rules) CheckRecalibration(to api.Recalibration) []api.FieldError {
	var c checks
	c.count("capacity", to.Capacity)
	c.count("stock", to.Stock)
	switch {
	case to.FromSeats && to.Capacity != nil:
		c.add("from_seats", "asks the seat service for the capacity: leave out capacity")
	case to.FromSeats && !r.Seats:
		c.add("from_seats", "needs BULKACTION_BROKER_SEATS_URL, the address of the seat service, at ingest and all "+
			"brokers")
	case !to.FromSeats && to.Capacity == nil && to.Stock == nil:
		c.add("capacity", "is required, or stock, or from_seats: there is nothing to change")
	}
	return c.bad
}

// checks collects bad fields, at most one problem each.
type checks struct{ bad []api.FieldError }

func (c *checks) add(field, problem string) {
	if !slices.ContainsFunc(c.bad, func(f api.FieldError) bool { return f.Field == field }) {
		c.bad = append(c.bad, api.FieldError{Field: field, Problem: problem})
	}
}

func (c *checks) count(field string, n *int64) {
	if n != nil && (*n < 0 || *n > MaxCapacity) {
		c.add(field, "must be a whole number from 0 to 10,000,000")
	}
}

// oneOf accepts the allowed values, and "" for the default.
func (c *checks) oneOf(field, value string, allowed ...string) {
	if value != "" && !slices.Contains(allowed, value) {
		last := len(allowed) - 1
		c.add(field, "must be "+strings.Join(allowed[:last], ", ")+" or "+allowed[last])
	}
}

// checkURL returns what is wrong with a return_url, or "". The waiting room redirects visitors to
// this address, so a wrong one could send them to an attacker's site.
func (r Rules) checkURL(text string) string {
	if len(text) > maxURL {
		return "must have at most 2,048 bytes"
	}
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" || u.Opaque != "" || u.User != nil || strings.ContainsAny(text, "\\ \t\r\n") {
		return "must be an address such as https://shop.example/buy, without a user name"
	}
	loopback := IsLoopback(u.Hostname())
	switch {
	case u.Scheme != "https" && (u.Scheme != "http" || !loopback):
		return "must begin with https://; http:// is allowed to loopback addresses only"
	case !loopback && !r.knownHost(u):
		return "its host " + u.Hostname() + " is not in BULKACTION_BROKER_RETURN_HOSTS: add it there for ingest and " +
			"all brokers, and restart them"
	}
	return ""
}

func (r Rules) knownHost(u *url.URL) bool {
	host, withPort := u.Hostname(), net.JoinHostPort(u.Hostname(), cmp.Or(u.Port(), "443"))
	return slices.ContainsFunc(r.ReturnHosts, func(allowed string) bool {
		return strings.EqualFold(strings.Trim(allowed, "[]"), host) || strings.EqualFold(allowed, withPort)
	})
}

// IsLoopback reports whether host is localhost or a loopback address.
func IsLoopback(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}

// Fill returns the settings with all defaults filled in. The settings must have passed Check.
// Without a capacity, it sets Settings.SeatsPending: the seat service must be asked for it. It
// leaves a missing mode empty, so that a change of another setting does not open a paused event.
func (r Rules) Fill(set api.EventSettings) waitingroom.Settings {
	d := r.Defaults
	s := waitingroom.Settings{
		Stock:        set.Stock,
		MaxWaiting:   orDefault(set.MaxWaiting, d.MaxWaiting),
		TokenTTL:     orDuration(set.TokenTTL, d.TokenTTL),
		Leeway:       orDuration(set.Leeway, d.Leeway),
		MaxSession:   orDuration(set.MaxSession, d.MaxSession),
		Ready:        orDuration(set.Ready, d.Ready),
		Grace:        orDuration(set.Grace, d.Grace),
		OnClose:      cmp.Or(set.OnClose, d.OnClose),
		NoShow:       cmp.Or(set.NoShow, d.NoShow),
		Mode:         set.Mode,
		ReturnURL:    set.ReturnURL,
		Retention:    orDuration(set.Retention, d.Retention),
		SeatsPending: set.Capacity == nil,
	}
	s.Capacity = orDefault(set.Capacity, 0)
	if set.Rate != nil {
		s.Rate = *set.Rate
		s.Burst = cmp.Or(set.Burst, max(1, int64(s.Rate)))
	}
	return s
}

func orDefault(n *int64, def int64) int64 {
	if n == nil {
		return def
	}
	return *n
}

func orDuration(d *api.Duration, def time.Duration) time.Duration {
	if d == nil {
		return def
	}
	return time.Duration(*d)
}
