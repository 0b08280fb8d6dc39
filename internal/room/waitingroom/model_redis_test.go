package waitingroom

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/bulkaction/bulkaction/internal/redisx/call"
	"github.com/bulkaction/bulkaction/internal/testkit/rapidtest"
)

// modelBase is the prefix of the keys of the partition that the model test uses.
const modelBase = "t:{0}:"

var allScripts = []*call.Script{
	declareScript, enterScript, disconnectScript, leaveScript, promoteScript, claimScript, renewScript,
	completeScript, expireScript, sweepScript, forgetScript, snapshotScript, auditScript,
}

var modelKeys = []string{modelBase, modelBase + "absent"}

type storedEvent struct {
	hash                 map[string]string
	waiting, away, slots map[string]int64
	users                map[string]string
}

// stored is the state of a partition in Redis.
type stored struct {
	events       map[string]*storedEvent
	rooms        map[string]int64
	cleanup      map[string]string
	entry, moves []string
	wake         int
}

func (s *stored) event(id string) *storedEvent {
	if s.events[id] == nil {
		s.events[id] = &storedEvent{}
	}
	return s.events[id]
}

// readStored parses the content of all keys. It returns an error for a key that is not in the design.
func readStored(keys map[string]rapidtest.Key) (*stored, error) {
	s := &stored{events: map[string]*storedEvent{}}
	var failed error
	for name, k := range keys {
		key := strings.TrimPrefix(name, modelBase)
		scores := func() map[string]int64 {
			out := map[string]int64{}
			for member, score := range k.Hash() {
				n, err := strconv.ParseFloat(score, 64)
				failed = errors.Join(failed, err)
				out[member] = int64(n)
			}
			return out
		}
		switch kind, rest, _ := strings.Cut(key, ":"); {
		case key == "rooms":
			s.rooms = scores()
		case key == "cleanup":
			s.cleanup = k.Hash()
		case key == "entry":
			s.entry = k.Content
		case key == "moves":
			s.moves = k.Content
		case key == "wake:promoter":
			s.wake = len(k.Content)
		case kind == "room":
			id, part, _ := strings.Cut(rest, ":")
			switch part {
			case "":
				s.event(id).hash = k.Hash()
			case "users":
				s.event(id).users = k.Hash()
			case "waiting":
				s.event(id).waiting = scores()
			case "away":
				s.event(id).away = scores()
			case "slots":
				s.event(id).slots = scores()
			default:
				failed = fmt.Errorf("no key of the design: %s", name)
			}
		default:
			failed = fmt.Errorf("no key of the design: %s", name)
		}
	}
	return s, failed
}

// ofState lists the fields of an event's hash that are neither settings nor counters.
var ofState = []string{"rev", "tail", "change", "fence", "t", "closed", "steps"}

// String shows the state as refRooms.String does.
func (s *stored) String() string {
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	for id, e := range s.events {
		for name, value := range e.hash {
			switch {
			case name == "t":
				value = strings.TrimSuffix(value, ".00")
				add("%s state t=%s", id, value)
			case slices.Contains(ofState, name):
				if value != "0" {
					add("%s state %s=%s", id, name, value)
				}
			case slices.Contains(counters, name):
				add("%s count %s=%s", id, name, value)
			default:
				add("%s setting %s=%s", id, name, value)
			}
		}
		for user, record := range e.users {
			add("%s user %s=%s", id, user, record)
		}
		for key, set := range map[string]map[string]int64{"waiting": e.waiting, "away": e.away, "slots": e.slots} {
			for user, score := range set {
				add("%s %s %s=%d", id, key, user, score)
			}
		}
	}
	for id, at := range s.rooms {
		add("rooms %s=%d", id, at)
	}
	if c := s.cleanup; c != nil {
		add("cleanup last_run=%s hold_until=%s steps=%s", c["last_run"], c["hold_until"], c["steps"])
	}
	add("woken %v", s.wake == 1)
	for i, m := range s.moves {
		f := strings.Split(m, " ") // event E change N gone …
		add("moves %03d %s", i, strings.Join(append([]string{f[1], f[3]}, f[5:]...), " "))
	}
	for i, m := range s.entry {
		add("entry %03d %s", i, strings.NewReplacer("type ", "", " data ", " ").Replace(m))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// eventIDs returns the events in order.
func (s *stored) eventIDs() []string { return slices.Sorted(maps.Keys(s.events)) }
