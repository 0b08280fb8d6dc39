// Command dispatcher is the dispatcher as a process of its own: it brings parked jobs back, and
// those of dead workers. -help lists its environment.
package main

import (
	"github.com/bulkaction/bulkaction/internal/app"
	"github.com/bulkaction/bulkaction/internal/roles"
)

func main() { app.Main("dispatcher", roles.Alone(roles.Dispatcher)) }
