package groups

import (
	"cmp"
	"context"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/access/auth"
	"github.com/bulkaction/bulkaction/internal/jobs/ledger"
)

const (
	summaryRecords  = 5000 // records that a summary reads
	maxFingerprints = 20   // fingerprints that a summary shows of one code
	maxSamples      = 5    // failures that a summary shows of one fingerprint
	maxErrorShown   = 500  // bytes of an error in a summary
	maxSummaryCodes = 100  // codes that a summary shows

	// summaryAge is how long FailureSummary uses the same records again, unless the number of
	// failed jobs of a code changes.
	summaryAge       = 10 * time.Second
	maxKeptSummaries = 16 // groups whose records are used again; those of one have 5 MB at most
)

// failureReading is what was read of a group's failed jobs.
type failureReading struct {
	counts map[string]int64 // by code, at that time
	read   *failureCounts
}

// FailureSummary counts the failed jobs of a group by code, and up to summaryRecords of them by
// fingerprint. For a principal that may not see payloads it reads no record. Records that were read
// are used again for summaryAge, so that repeated calls cost little.
func (s *failures) FailureSummary(ctx context.Context, id string) (sum api.FailureSummary, err error) {
	p, tenant, err := s.locateGroup(ctx, id)
	if err != nil {
		return sum, err
	}
	counts, err := ledger.FailureCodes(ctx, s.conn.Cmd, p, id)
	if err != nil {
		return sum, apiError(err)
	}
	if !auth.SeesPayloads(ctx) {
		return newFailureCounts().summary(counts), nil
	}
	unchanged := func(r failureReading) bool { return maps.Equal(r.counts, counts) }
	r, err := s.recent.get(ctx, tenant+"/"+id, unchanged, func() (failureReading, error) {
		records, err := ledger.SomeFailures(ctx, s.conn.Cmd, p, id, summaryRecords)
		if err != nil {
			return failureReading{}, err
		}
		read := newFailureCounts()
		for i := range records {
			read.add(&records[i])
		}
		return failureReading{counts, read}, nil
	})
	if err != nil {
		return sum, apiError(err)
	}
	return r.read.summary(counts), nil
}

// failureCounts counts failed jobs by code and fingerprint. After the last call of add, goroutines
// may use it concurrently.
type failureCounts struct {
	seen   int64
	byCode map[string]*codeCounts
}

type codeCounts struct {
	seen   int64
	byText map[string]*api.FailureFingerprint
}

func newFailureCounts() *failureCounts { return &failureCounts{byCode: map[string]*codeCounts{}} }

// add counts a failed job.
func (c *failureCounts) add(e *ledger.JobError) {
	c.seen++
	code := c.byCode[e.Code]
	if code == nil {
		code = &codeCounts{byText: map[string]*api.FailureFingerprint{}}
		c.byCode[e.Code] = code
	}
	code.seen++
	shown := shorten(e.Error)
	text := fingerprint(shown)
	f := code.byText[text]
	if f == nil {
		f = &api.FailureFingerprint{Text: text}
		code.byText[text] = f
	}
	if f.Sampled++; len(f.Samples) < maxSamples {
		f.Samples = append(f.Samples, api.FailureSample{Ordinal: e.Ordinal, At: e.Time(), Error: shown})
	}
}

// summary returns the summary of a group that has these failed jobs by code.
func (c *failureCounts) summary(counts map[string]int64) api.FailureSummary {
	sum := api.FailureSummary{Seen: c.seen, Codes: []api.FailureCode{}}
	for code, n := range counts {
		sum.Total += n
		sum.Codes = append(sum.Codes, api.FailureCode{
			Code: code, Count: n, Fingerprints: c.byCode[code].fingerprints(n),
		})
	}
	slices.SortFunc(sum.Codes, func(a, b api.FailureCode) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Code, b.Code))
	})
	sum.Codes = sum.Codes[:min(len(sum.Codes), maxSummaryCodes)]
	return sum
}

// fingerprints returns the most frequent fingerprints of a code that n jobs have failed with. If
// not all n jobs were read, each Count is an estimate. It assumes that the other jobs are like
// those that were: Redis returns the records in an order that does not depend on the errors.
func (c *codeCounts) fingerprints(n int64) []api.FailureFingerprint {
	all := []api.FailureFingerprint{}
	if c == nil {
		return all
	}
	for _, counted := range c.byText {
		f := *counted
		f.Count = f.Sampled
		if n > c.seen {
			f.Count = (f.Sampled*n + c.seen/2) / c.seen
		}
		all = append(all, f)
	}
	slices.SortFunc(all, func(a, b api.FailureFingerprint) int {
		return cmp.Or(cmp.Compare(b.Sampled, a.Sampled), cmp.Compare(a.Text, b.Text))
	})
	all = all[:min(len(all), maxFingerprints)]
	for i := range all {
		all[i].Samples = slices.Clone(all[i].Samples)
	}
	return all
}

// variable matches the parts of an error that differ from job to job: UUIDs, host names with an
// optional user before an @, IPv6 addresses in brackets, IPv4 addresses, and digits.
var variable = regexp.MustCompile(`[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}` +
	`|(?:[A-Za-z0-9_.+-]+@)?(?:[A-Za-z0-9_-]+\.)+[a-z]{2,}\b` +
	`|\[[0-9a-fA-F]*:[0-9a-fA-F:.]*\]` +
	`|(?:[0-9]{1,3}\.){3}[0-9]{1,3}` +
	`|[0-9]+`)

// fingerprint returns an error with its variable parts replaced by <uuid>, <address> (user@host),
// <host> (also for an IP address) and <n>.
func fingerprint(text string) string {
	return variable.ReplaceAllStringFunc(text, func(part string) string {
		switch {
		case strings.Contains(part, "@"):
			return "<address>"
		case len(part) == 36 && part[8] == '-' && strings.Count(part, "-") == 4 && !strings.Contains(part, "."):
			return "<uuid>"
		case strings.ContainsAny(part, ".:"):
			return "<host>"
		}
		return "<n>"
	})
}

// shorten cuts an error that is longer than maxErrorShown bytes there, and adds an ellipsis.
func shorten(text string) string {
	if len(text) <= maxErrorShown {
		return text
	}
	end := maxErrorShown
	for end > 0 && !utf8.RuneStart(text[end]) {
		end--
	}
	return text[:end] + "…"
}
