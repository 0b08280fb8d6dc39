// Command worker runs the role worker as a process: it runs jobs with the built-in processors.
// The flag -help lists its environment variables.
package main

import (
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/builtin"
	"github.com/bulkaction/bulkaction/internal/process/roles"
)

func main() {
	app.Main("worker", new(builtin.Config), roles.Alone(roles.Own{BuiltIn: builtin.Create}.Worker))
}
