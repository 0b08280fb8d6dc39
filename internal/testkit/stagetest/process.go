package stagetest

import "github.com/bulkaction/bulkaction/internal/stage"

// Process returns the stage.Process with which a test runs a role of the installation: with a
// connection of its own, and the name id.
func Process(w *World, id string) stage.Process {
	w.T.Helper()
	return stage.Process{ID: id, Conn: w.Connect(), Space: w.Space, Tel: w.Tel}
}
