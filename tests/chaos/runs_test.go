package chaos

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// execution is one run of a job, as the worker process recorded it in its file.
type execution struct {
	process string
	attempt int
	began   time.Time
	how     string // end, fail, cut or crash; "" if the file does not say more
	ended   time.Time
}

// readRuns reads the files in which workers record what they ran: evidence that does not depend on
// Redis. It returns the runs by job.
func readRuns(folder string) (map[string][]execution, error) {
	files, err := os.ReadDir(folder)
	if err != nil {
		return nil, err
	}
	jobs := map[string][]execution{}
	for _, f := range files {
		if err := readFile(jobs, folder, f.Name()); err != nil {
			return nil, fmt.Errorf("read runs of %s: %w", f.Name(), err)
		}
	}
	return jobs, nil
}

func readFile(jobs map[string][]execution, folder, name string) error {
	f, err := os.Open(filepath.Join(folder, name))
	if err != nil {
		return err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var what, job string
		var attempt int
		var nano int64
		if _, err := fmt.Sscan(lines.Text(), &what, &job, &attempt, &nano); err != nil {
			return fmt.Errorf("line %q: %w", lines.Text(), err)
		}
		at := time.Unix(0, nano)
		if what == "start" {
			jobs[job] = append(jobs[job], execution{process: name, attempt: attempt, began: at})
			continue
		}
		runs := jobs[job]
		i := slices.IndexFunc(runs, func(r execution) bool { return r.process == name && r.attempt == attempt && r.how == "" })
		if i < 0 {
			return fmt.Errorf("line %q: its start is missing", lines.Text())
		}
		runs[i].how, runs[i].ended = what, at
	}
	return lines.Err()
}

// recoveries returns, for each run that was interrupted and did not count, the time from the loss
// of its process to the next start of the job. Without a next start it returns nothing for the run.
func recoveries(jobs map[string][]execution, spans []span) []time.Duration {
	lost := map[string][]span{}
	for _, s := range spans {
		lost[s.process] = append(lost[s.process], s)
	}
	var all []time.Duration
	for _, runs := range jobs {
		for _, r := range runs {
			at, ok := interrupted(r, lost[r.process])
			if !ok {
				continue
			}
			var next time.Time
			for _, other := range runs {
				if other.began.After(at) && (next.IsZero() || other.began.Before(next)) {
					next = other.began
				}
			}
			went := r.how == "end" || r.how == "fail"              // the run continued when its process did
			if !next.IsZero() && (!went || next.Before(r.ended)) { // otherwise its outcome counted, or its attempt had been taken back
				all = append(all, next.Sub(at))
			}
		}
	}
	return all
}

// interrupted returns whether a run was interrupted, by a crash or because its process was killed
// or suspended, and when.
func interrupted(r execution, spans []span) (time.Time, bool) {
	if r.how == "crash" {
		return r.ended, true
	}
	for _, s := range spans {
		if r.began.Before(s.from) && (r.how == "" || r.ended.After(s.from)) {
			return s.from, true
		}
	}
	return time.Time{}, false
}

// percentile returns the value that the given share (0 to 1) of the values does not exceed; 0
// without values. It sorts the values in place.
func percentile(all []time.Duration, share float64) time.Duration {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[min(len(all)-1, int(share*float64(len(all))))]
}

var errTooFew = errors.New("there are fewer")
