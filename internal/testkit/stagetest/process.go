package stagetest

import "github.com/bulkaction/bulkaction/internal/stage"

// Process returns what a role of the installation gets from its process: a connection of its own,
// and the name id.
func Process(w *World, id string) stage.Process {
	w.T.Helper()
	return stage.Process{ID: id, Conn: w.Connect(), Space: w.Space, Tel: w.Tel}
}
