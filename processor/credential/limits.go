package credential

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Limits are the limits of accounts that set none of their own. Each field is set by an environment
// variable with the prefix of its processor.
type Limits struct {
	// Rate is how often one account may be used in a time span, such as 80/10m; none is no limit.
	Rate Rate `env:"ACCOUNT_RATE" envDefault:"80/10m" check:"rate"`
	// Limiter is how uses are counted. sliding: a rate of 80/10m allows at most 80 uses in any 10
	// minutes. token: an account saves up unused uses, so that some 10 minutes have up to 160.
	Limiter string `env:"ACCOUNT_LIMITER" envDefault:"sliding" oneof:"sliding,token"`
	// Breaker says when an account is not used because it fails: after this many failures in a row,
	// for this time, until this many uses succeed, such as 3/10m/3; none is no breaker.
	Breaker Breaker `env:"ACCOUNT_BREAKER" envDefault:"3/10m/3" check:"breaker"`
	// Concurrency is how often one account may be used at once; the text unbounded allows any
	// number.
	Concurrency Concurrency `env:"ACCOUNT_CONCURRENCY" envDefault:"1" check:"concurrency"`
}

// These are the values of [Limits.Limiter].
const (
	Sliding = "sliding"
	Token   = "token"
)

// Rate is the most calls in a time span. Its text is a number, a slash and a time, such as 80/10m,
// or none.
type Rate struct {
	Permits int // 0: no limit
	Window  time.Duration
}

// The largest values that guards know.
const (
	maxPermits = 1_000_000_000
	maxCount   = 1_000_000
	maxProbes  = 1_000
	maxTime    = 24 * time.Hour
)

const none = "none"

// UnmarshalText reads the text of a rate.
func (r *Rate) UnmarshalText(text []byte) error {
	s := string(text)
	if s == none {
		*r = Rate{}
		return nil
	}
	permits, window, _ := strings.Cut(s, "/")
	n, err := strconv.Atoi(permits)
	d, badWindow := parseTime(window)
	if err != nil || badWindow != nil || n < 1 || n > maxPermits {
		return fmt.Errorf("%q is neither a number above 0 with a time of at most 24h, such as 80/10m, nor none", s)
	}
	*r = Rate{Permits: n, Window: d}
	return nil
}

// MarshalText returns the text of a rate.
func (r Rate) MarshalText() ([]byte, error) {
	if r.Permits == 0 {
		return []byte(none), nil
	}
	return fmt.Appendf(nil, "%d/%s", r.Permits, r.Window), nil
}

// Breaker says when a circuit breaker opens and closes. Its text is such as 3/10m/3, or none.
type Breaker struct {
	Failures  int           // in a row, which open it; 0: no breaker
	OpenFor   time.Duration // how long it stays open; afterwards calls probe the account
	Successes int           // of probes, which close it
}

// UnmarshalText reads the text of a breaker.
func (b *Breaker) UnmarshalText(text []byte) error {
	s := string(text)
	if s == none {
		*b = Breaker{}
		return nil
	}
	parts := strings.Split(s, "/")
	if len(parts) == 3 {
		failures, bad1 := strconv.Atoi(parts[0])
		openFor, bad2 := parseTime(parts[1])
		successes, bad3 := strconv.Atoi(parts[2])
		if bad1 == nil && bad2 == nil && bad3 == nil && failures >= 1 && failures <= maxCount &&
			successes >= 1 && successes <= maxProbes {
			*b = Breaker{Failures: failures, OpenFor: openFor, Successes: successes}
			return nil
		}
	}
	return fmt.Errorf("%q is neither failures/time/successes of at least 1, such as 3/10m/3, nor none", s)
}

// MarshalText returns the text of a breaker.
func (b Breaker) MarshalText() ([]byte, error) {
	if b.Failures == 0 {
		return []byte(none), nil
	}
	return fmt.Appendf(nil, "%d/%s/%d", b.Failures, b.OpenFor, b.Successes), nil
}

// parseTime reads a time of whole milliseconds, 1 ms to 24 h.
func parseTime(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err == nil && (d < time.Millisecond || d > maxTime || d%time.Millisecond != 0) {
		err = errors.New("not 1ms to 24h")
	}
	return d, err
}

// Concurrency is how many calls may use an account at once: a number above 0, or Unbounded. Its
// text is the number, or unbounded.
type Concurrency int

// Unbounded is the concurrency of an account that any number of calls may use at once.
const Unbounded Concurrency = -1

const unbounded = "unbounded"

// UnmarshalText reads the text of a concurrency.
func (c *Concurrency) UnmarshalText(text []byte) error {
	s := string(text)
	if s == unbounded {
		*c = Unbounded
		return nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > maxCount {
		return fmt.Errorf("%q is neither a number above 0 nor unbounded", s)
	}
	*c = Concurrency(n)
	return nil
}

// MarshalText returns the text of a concurrency.
func (c Concurrency) MarshalText() ([]byte, error) {
	if c == Unbounded {
		return []byte(unbounded), nil
	}
	return strconv.AppendInt(nil, int64(c), 10), nil
}
