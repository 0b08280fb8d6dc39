// Command fetcher runs the role fetcher as a process: it admits jobs, fairly and within the rate
// limits. The flag -help lists its environment variables.
package main

import (
	"github.com/bulkaction/bulkaction/internal/process/app"
	"github.com/bulkaction/bulkaction/internal/process/roles"
)

func main() { app.Main("fetcher", nil, roles.Alone(roles.Fetcher)) }
