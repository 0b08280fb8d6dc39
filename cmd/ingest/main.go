// Command ingest runs the role ingest as a process: it accepts groups and jobs. The flag -help
// lists its environment variables.
package main

import (
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/roles"
	"github.com/bulkaction/bulkaction/reducer"
)

func main() { app.Main("ingest", nil, roles.Alone(roles.Ingest(reducer.NewRegistry(), nil))) }
