// Command worker is the worker as a process of its own: it runs jobs with the built-in processors.
// -help lists its environment.
package main

import (
	"github.com/bulkaction/bulkaction/internal/app"
	"github.com/bulkaction/bulkaction/internal/roles"
)

func main() { app.Main("worker", roles.Alone(roles.BuiltIn)) }
