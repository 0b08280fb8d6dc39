// Command watcher runs the role watcher as a process: it moves groups through their states and
// publishes their events. The flag -help lists its environment variables.
package main

import (
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/roles"
)

func main() { app.Main("watcher", nil, roles.Alone(roles.Own{}.Watcher)) }
