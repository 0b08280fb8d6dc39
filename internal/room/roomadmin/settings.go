package roomadmin

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
	maxCapacity = 10_000_000 // also of stock
	maxWaiting  = 100_000_000
	maxBurst    = 1_000_000
	minRate     = 0.001
	maxRate     = 1_000_000
	maxURL      = 2048 // bytes
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
		OnClose:    "keep",
		NoShow:     "wait",
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
	for _, d := range []struct {
		name     string
		v        *api.Duration
		min, max time.Duration
		rule     string
	}{
		{"token_ttl", set.TokenTTL, time.Second, 24 * time.Hour, "1s to 24h"},
		{"leeway", set.Leeway, 0, 5 * time.Minute, "0s to 5m"},
		{"max_session", set.MaxSession, 0, 720 * time.Hour, "0s (no limit) to 720h"},
		{"ready", set.Ready, 100 * time.Millisecond, 24 * time.Hour, "100ms to 24h"},
		{"grace", set.Grace, 0, 24 * time.Hour, "0s (the place ends with the stream) to 24h"},
		{"retention", set.Retention, 0, 8760 * time.Hour, "0s to 8760h"},
	} {
		switch got := time.Duration(orDefault(d.v, 0)); {
		case d.v == nil:
		case got < d.min || got > d.max:
			c.add(d.name, "must be "+d.rule)
		case got%time.Millisecond != 0:
			c.add(d.name, "must be whole milliseconds")
		}
	}
	c.oneOf("on_close", set.OnClose, "keep", "release")
	c.oneOf("no_show", set.NoShow, "wait", "release")
	c.oneOf("preset", set.Preset, api.PresetStandard, api.PresetStrict)
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
	if n != nil && (*n < 0 || *n > maxCapacity) {
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
	loopback := isLoopback(u.Hostname())
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

// isLoopback reports whether host is localhost or a loopback address.
func isLoopback(host string) bool {
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
	if set.Preset == api.PresetStrict {
		d.Grace, d.OnClose, d.NoShow = 0, "release", "release"
	}
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

func orDefault[T any](v *T, def T) T {
	if v == nil {
		return def
	}
	return *v
}

func orDuration(d *api.Duration, def time.Duration) time.Duration {
	return time.Duration(orDefault(d, api.Duration(def)))
}

// View is an event as the API shows it to operators. Its settings can be sent back unchanged. The
// capacity is missing until the seat service has answered.
func View(s waitingroom.Snapshot) api.RoomEvent {
	set := s.Settings
	v := api.RoomEvent{
		Event: s.Event,
		Rev:   s.Rev,
		EventSettings: api.EventSettings{
			Stock:      set.Stock,
			MaxWaiting: &set.MaxWaiting,
			TokenTTL:   new(api.Duration(set.TokenTTL)),
			Leeway:     new(api.Duration(set.Leeway)),
			MaxSession: new(api.Duration(set.MaxSession)),
			Ready:      new(api.Duration(set.Ready)),
			Grace:      new(api.Duration(set.Grace)),
			OnClose:    set.OnClose,
			NoShow:     set.NoShow,
			Mode:       set.Mode,
			ReturnURL:  set.ReturnURL,
			Retention:  new(api.Duration(set.Retention)),
		},
		Slots:    api.EventSlots{Capacity: set.Capacity, Used: s.Used, Free: s.Free, Stock: s.Left},
		Waiting:  s.Waiting,
		Away:     s.Away,
		Tail:     s.Tail,
		Counters: s.Counters,
	}
	if !set.SeatsPending {
		v.Capacity = &set.Capacity
	}
	if set.Rate > 0 {
		v.Rate, v.Burst = &set.Rate, set.Burst
	}
	limit := set.Capacity
	if s.Left != nil {
		limit = min(limit, *s.Left)
	}
	v.Over = max(0, s.Used-limit)
	return v
}
