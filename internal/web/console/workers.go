package console

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"strings"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/web/httpapi"
)

// workersPage shows the live processes of all roles.
type workersPage struct{ backend httpapi.Backend }

// workersData is the data of the page of processes.
type workersData struct {
	Roles    []api.RoleStatus
	Workers  []workerRow
	Stages   []api.StageStatus // by role
	Slots    int
	Busy     int
	Unserved []api.TypeStats // types that have jobs and no worker
	Versions []string
}

type workerRow struct {
	api.WorkerStatus
	Jobs []jobLink
}

// jobLink is the id of a job, and the path of the job's page; "" if the id is not GROUP.ORDINAL.
type jobLink struct{ ID, Path string }

func (p workersPage) view(r *http.Request) (view, error) {
	data, err := p.read(r.Context())
	return view{name: "workers", title: "Workers", data: data, topic: "workers"}, err
}

func (p workersPage) open(_ context.Context, arg string) (func(context.Context) (any, error), error) {
	if arg != "" {
		return nil, api.ErrNotFound
	}
	return p.read, nil
}

func (p workersPage) read(ctx context.Context) (any, error) {
	s, err := p.backend.Stats(ctx)
	if err != nil {
		return nil, err
	}
	d := workersData{Roles: s.Roles, Stages: slices.Clone(s.Stages)}
	for _, w := range s.Workers {
		row := workerRow{WorkerStatus: w}
		for _, id := range w.CurrentJobs {
			row.Jobs = append(row.Jobs, jobLink{id, jobPath(id)})
		}
		d.Workers = append(d.Workers, row)
		d.Slots += w.Workers
		d.Busy += w.Active
		d.Versions = append(d.Versions, w.Version)
	}
	for _, p := range d.Stages {
		d.Versions = append(d.Versions, p.Version)
	}
	for _, t := range s.Types {
		if t.Workers == 0 && t.Backlog+t.InFlight > 0 {
			d.Unserved = append(d.Unserved, t)
		}
	}
	slices.Sort(d.Versions)
	d.Versions = slices.Compact(d.Versions)
	slices.SortStableFunc(d.Stages, func(a, b api.StageStatus) int {
		return cmp.Compare(slices.Index(api.Roles, a.Role), slices.Index(api.Roles, b.Role))
	})
	return d, nil
}

// jobPath returns the path of a job's page for the id GROUP.ORDINAL; "" for any other text.
func jobPath(id string) string {
	i := strings.LastIndexByte(id, '.')
	if i < 0 || !api.ValidID(id[:i]) || strings.Trim(id[i+1:], "0123456789") != "" || i+1 == len(id) {
		return ""
	}
	return root + "/groups/" + id[:i] + "/jobs/" + id[i+1:]
}
