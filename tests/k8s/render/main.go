// Command render writes the files that are made from the Helm chart and for it: `make chart`.
package main

import (
	"fmt"
	"os"

	k8s "github.com/bulkaction/bulkaction/tests/k8s"
)

func main() {
	if err := k8s.Write("../.."); err != nil {
		fmt.Fprintln(os.Stderr, "render:", err)
		os.Exit(1)
	}
}
