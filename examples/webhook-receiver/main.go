// Command webhook-receiver prints the callbacks that it gets: it checks their signatures, and drops
// repeated ones.
package main

import (
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/bulkaction/bulkaction/client"
)

func main() {
	addr := flag.String("addr", "127.0.0.1:9090", "address to listen on")
	file := flag.String("secret-file", "secret", "file with what `bulkaction callback secret TENANT` prints")
	flag.Parse()
	secret, err := os.ReadFile(*file)
	if err != nil {
		log.Fatal(err)
	}
	server := &http.Server{
		Addr: *addr, Handler: newReceiver(strings.TrimSpace(string(secret)), os.Stdout), ReadTimeout: 15 * time.Second,
	}
	log.Fatal(server.ListenAndServe())
}

// maxBody is more than any callback has.
const maxBody = 64 << 10

// maxSeen is how many ids the receiver remembers. A service with a database stores the id in the
// transaction in which it handles the event instead.
const maxSeen = 10_000

type receiver struct {
	secret string
	out    io.Writer

	mu   sync.Mutex
	seen map[string]bool
	ids  []string // of seen, the oldest first
}

func newReceiver(secret string, out io.Writer) *receiver {
	return &receiver{secret: secret, out: out, seen: map[string]bool{}}
}

// ServeHTTP answers 2xx once it has handled a callback: otherwise the callback comes again.
func (s *receiver) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	if err != nil {
		http.Error(w, "the body can't be read", http.StatusBadRequest)
		return
	}
	event, err := client.VerifyWebhook(s.secret, r.Header, body)
	if err != nil {
		log.Println(err)
		http.Error(w, "not a callback", http.StatusUnauthorized)
		return
	}
	id := r.Header.Get("webhook-id")
	err = s.once(id, func() error {
		group := event.Data
		_, err := fmt.Fprintf(s.out, "%s: %s of %s in round %d, %d jobs done, %d failed\n",
			event.Type, group.ID, group.Tenant, group.Round, group.Counts.Done, group.Counts.Failed)
		return err
	})
	if err != nil {
		http.Error(w, "try again", http.StatusInternalServerError)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// once calls handle, unless it has been called for this id without an error.
func (s *receiver) once(id string, handle func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.seen[id] {
		return nil
	}
	if err := handle(); err != nil {
		return err
	}
	s.seen[id] = true
	if s.ids = append(s.ids, id); len(s.ids) > maxSeen {
		delete(s.seen, s.ids[0])
		s.ids = s.ids[1:]
	}
	return nil
}
