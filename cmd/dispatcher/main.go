// Command dispatcher runs the role dispatcher as a process: it promotes due non-ready jobs and
// reclaims the jobs of dead workers. The flag -help lists its environment variables.
package main

import (
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/roles"
)

func main() { app.Main("dispatcher", nil, roles.Alone(roles.Dispatcher)) }
