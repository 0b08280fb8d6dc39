// Command fetcher is the fetcher as a process of its own: it hands jobs out, fairly and within the
// limits. -help lists its environment.
package main

import (
	"github.com/bulkaction/bulkaction/internal/app"
	"github.com/bulkaction/bulkaction/internal/roles"
)

func main() { app.Main("fetcher", roles.Alone(roles.Fetcher)) }
