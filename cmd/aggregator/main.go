// Command aggregator runs the role aggregator as a process: it reduces results. The flag -help
// lists its environment variables.
package main

import (
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/roles"
)

func main() { app.Main("aggregator", nil, roles.Alone(roles.Own{}.Aggregator)) }
