package chaos

import (
	"os"
	"testing"

	"github.com/bulkaction/bulkaction/internal/testkit/proctest"
)

func TestMain(m *testing.M) { os.Exit(proctest.Run(m, "./cmd/bulkaction", "./tests/testworker")) }

// binaries has the paths of two programs: bulkaction, which runs as each other role and as the
// audit, and the worker of these tests.
type binaries struct{ bulkaction, worker string }

func built(t testing.TB) binaries {
	t.Helper()
	return binaries{proctest.Path(t, "bulkaction"), proctest.Path(t, "testworker")}
}
