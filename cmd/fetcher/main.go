// Command fetcher runs the role fetcher as a process: it admits jobs, fairly and within the rate
// limits. The flag -help lists its environment variables.
package main

import (
	"github.com/bulkaction/bulkaction/internal/app"
	"github.com/bulkaction/bulkaction/internal/roles"
)

func main() { app.Main("fetcher", roles.Alone(roles.Fetcher)) }
