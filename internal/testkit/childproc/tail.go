package childproc

import "sync"

// Tail is a writer that stores only the last 64 KiB written to it. It is for the log of a child.
// The zero value is ready for use. It is safe for concurrent use.
type Tail struct {
	mu  sync.Mutex
	buf []byte
}

const tailBytes = 64 << 10

// Write keeps p and drops the oldest bytes. It never fails.
func (w *Tail) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.buf = append(w.buf, p...)
	if excess := len(w.buf) - tailBytes; excess > tailBytes { // copies rarely, not at each write
		w.buf = append(w.buf[:0], w.buf[excess:]...)
	}
	return len(p), nil
}

// String returns the last 64 KiB, or all bytes if there are fewer.
func (w *Tail) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return string(w.buf[max(0, len(w.buf)-tailBytes):])
}
