// Command broker runs the role broker as a process: it holds the streams of visitors of the waiting
// room, promotes them and gives them entry tokens. The flag -help lists its environment variables.
package main

import (
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/roles"
)

func main() { app.Main("broker", nil, roles.Alone(roles.Own{}.Broker)) }
