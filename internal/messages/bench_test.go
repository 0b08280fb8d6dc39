package messages_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/internal/messages"
)

const benchJobs = 5000

// smallJobs returns the body of a submission with many small jobs.
func smallJobs(n int) []byte {
	var b strings.Builder
	b.WriteString(`{"tenant":"acme","type":"SEND_EMAIL","seal":true,"jobs":[`)
	for i := range n {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, `{"payload":{"to":"user%d@example.com"}}`, i)
	}
	b.WriteString(`]}`)
	return []byte(b.String())
}

func perJob(b *testing.B, jobs int) {
	ns := float64(b.Elapsed().Nanoseconds()) / float64(b.N*jobs)
	b.ReportMetric(ns, "ns/job")
	b.ReportMetric(1e9/ns, "jobs/s")
}

func BenchmarkDecodeSubmit(b *testing.B) {
	data := smallJobs(benchJobs)
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		_, err := messages.Decoder{}.DecodeSubmit(data)
		require.NoError(b, err)
	}
	perJob(b, benchJobs)
}

func BenchmarkDecodeJob(b *testing.B) {
	line := []byte(`{"payload":{"to":"user1@example.com"},"type":"SEND_EMAIL"}`)
	b.ReportAllocs()
	for b.Loop() {
		_, err := messages.Decoder{}.DecodeJob(line)
		require.NoError(b, err)
	}
	perJob(b, 1)
}

func BenchmarkParseEntry(b *testing.B) {
	values := map[string]any{"type": messages.TypeGroupSubmit, "data": string(smallJobs(benchJobs))}
	b.ReportAllocs()
	for b.Loop() {
		_, err := messages.ParseEntry("1700000000000-0", values)
		require.NoError(b, err)
	}
	perJob(b, benchJobs)
}

// BenchmarkAppend measures how ingest parses an entry of the ingest stream with many jobs, and with
// one job.
func BenchmarkAppend(b *testing.B) {
	for _, jobs := range []int{500, 1} {
		b.Run(fmt.Sprintf("jobs=%d", jobs), func(b *testing.B) {
			job := `{"payload":{"pad":"` + strings.Repeat("x", 190) + `"}}`
			data := `{"group":"some-group","jobs":[` + strings.Repeat(job+",", jobs-1) + job + `]}`
			fields := []string{"type", messages.TypeJobsAppend, "data", data}
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			for b.Loop() {
				e, err := messages.ParseFields("1700000000000-0", fields)
				if err != nil {
					b.Fatal(err)
				}
				a, err := messages.Decoder{}.DecodeAppendEntry(e)
				if err != nil || len(a.Jobs) != jobs {
					b.Fatal(err)
				}
			}
			perJob(b, jobs)
		})
	}
}

// BenchmarkContentHash measures ContentHash, by which ingest recognizes a repeated submission.
func BenchmarkContentHash(b *testing.B) {
	g, err := messages.Decoder{}.DecodeSubmit(smallJobs(benchJobs))
	require.NoError(b, err)
	b.ReportAllocs()
	for b.Loop() {
		messages.ContentHash(g)
	}
	perJob(b, benchJobs)
}
