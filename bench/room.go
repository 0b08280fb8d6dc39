package bench

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/bulkaction/bulkaction/bench/roomload"
)

// RoomOptions say on what the waiting room is measured.
type RoomOptions struct {
	Options
	Users    int           // with a stream each, in each part but enter, empty and scripts
	Brokers  int           // processes
	Events   int           // of the part events
	Capacity int           // slots of the parts kill and abandon
	Rate     float64       // admissions a second of the part promotion
	Session  time.Duration // time that a user of the part abandon is inside
	Churn    float64       // part of the users who reload the page while they wait (part abandon)
	Kill     int           // brokers that the part kill kills
	Only     []string      // names of parts, see RoomParts; empty: all
}

// Room has the figures of the benchmark of the waiting room. Its JSON is a contract for programs
// that read it. The figures of parts that were not measured are missing.
type Room struct {
	Users   int `json:"users"`
	Brokers int `json:"brokers"`
	Events  int `json:"events"`
	Streams int `json:"streams"` // most that were open at a time
	*RoomStreams
	RoomFaults
	*RoomEnter
	*RoomPromotion
	*RoomUse
	*RoomReturns
	*RoomMemory
	Scripts RoomScripts `json:"scripts"`
	// Violations describes faults that must never happen, such as a lost user: at most
	// mostRoomViolations of them.
	Violations []string `json:"violations"`
}

// RoomFaults count what must not happen, over all parts.
type RoomFaults struct {
	PositionRises   int `json:"position_rises"`   // positions above the one before
	OrderInversions int `json:"order_inversions"` // users promoted before a lower number that was present
	OverCapacity    int `json:"over_capacity"`    // tokens received while all slots had valid tokens
	Lost            int `json:"lost"`             // users who neither got a token nor closed their tab
}

// RoomStreams has the figures of users who wait for one event, each on a stream of its own. One
// user a second is promoted, so that each stream gets a frame with a new position each second.
type RoomStreams struct {
	RSSKiBPerStream  float64 `json:"rss_kib_per_stream"` // of the brokers
	PositionAgeP99MS float64 `json:"position_age_p99_ms"`
	// CPU time of redis-server / time
	RedisCPURatio float64 `json:"redis_cpu_ratio"`
	// of clients, for each broker; a script is one command
	RedisCommandsPerSecond float64 `json:"redis_commands_per_second"`
}

// RoomEnter has the speed of POST …/ticket.
type RoomEnter struct {
	EnterPerSecond float64 `json:"enter_per_second"` // as fast as the brokers answer
	// EnterP99MS is measured at 3,000 users a second: from the time at which a call was due until
	// its answer.
	EnterP99MS float64 `json:"enter_p99_ms"`
}

// RoomPromotion has the time from the promotion of a user, by Redis's clock, until the user has
// received the entry token.
type RoomPromotion struct {
	PromoteToAdmittedP50MS float64 `json:"promote_to_admitted_p50_ms"`
	PromoteToAdmittedP99MS float64 `json:"promote_to_admitted_p99_ms"`
}

// RoomUse has the fraction of an event's slots that is in use while users wait.
type RoomUse struct {
	Utilisation float64 `json:"utilisation"`
}

// RoomReturns shows how the users of killed brokers fare.
type RoomReturns struct {
	// ReturnedP99S is the 99th percentile of the time from the break of a user's stream, when its
	// broker is killed, until a later stream has shown the user the position or the token.
	ReturnedP99S float64 `json:"returned_p99_s"`
	PlacesKept   float64 `json:"places_kept"` // part of the users who kept the place
}

// RoomMemory has the bytes of Redis memory that a waiting user takes; user ids have 22 characters.
type RoomMemory struct {
	RedisBytesPerUser float64 `json:"redis_bytes_per_user"`
}

// RoomScripts has all figures that are not part of the JSON contract of Room, for example those of
// the scripts.
type RoomScripts struct {
	CPUs int `json:"cpus"`
	*RoomStreamCosts
	*RoomEnterCosts
	*RoomPromotionCosts
	*RoomEmpty
	*RoomKill
	*RoomEvents
	*RoomAbandon
	*RoomBatches
	Overrides map[string]string `json:"overrides"` // settings of the processes
}

// RoomStreamCosts has more figures of the users who wait on streams; see RoomStreams.
type RoomStreamCosts struct {
	FrameCPUUS       float64 `json:"frame_cpu_us"` // CPU of the brokers for a frame
	FramesPerSecond  float64 `json:"frames_per_second"`
	OpenedPerSecond  float64 `json:"streams_opened_per_second"`
	PositionAgeP50MS float64 `json:"position_age_p50_ms"`
	WrongPositions   int     `json:"wrong_positions"` // after the queue has stood still
}

// RoomEnterCosts has the CPU time of an entry over HTTP.
type RoomEnterCosts struct {
	EnterCPUUS      float64 `json:"enter_cpu_us"` // of the brokers
	EnterRedisCPUUS float64 `json:"enter_redis_cpu_us"`
	EnterP50MS      float64 `json:"enter_p50_ms"`
}

// RoomPromotionCosts has the CPU time per promoted user, from the promotion to the token on the
// stream, and the promotions a second.
type RoomPromotionCosts struct {
	PromotionCPUUS      float64 `json:"promotion_cpu_us"` // of the brokers
	PromotionRedisCPUUS float64 `json:"promotion_redis_cpu_us"`
	PromotionsPerSecond float64 `json:"promotions_per_second"`
}

// RoomEmpty has the time from opening a connection until the user has a token, while nobody else
// waits and slots are free.
type RoomEmpty struct {
	EmptyP50MS float64 `json:"empty_p50_ms"`
	EmptyP99MS float64 `json:"empty_p99_ms"`
}

// RoomKill has more figures of the killing of brokers, besides RoomReturns: of their users, of lost
// slots, and of the whole run.
type RoomKill struct {
	Broken        int     `json:"broken_streams"` // of users without a token
	ReturnedMaxS  float64 `json:"returned_max_s"`
	SlotsLeaked   int     `json:"slots_leaked"` // slots in use a minute after the last user has left
	FreeAfterS    float64 `json:"slots_free_after_s"`
	KillDrainTime float64 `json:"kill_seconds"` // from the first promotion to the last token
}

// RoomEvents compares how fast users are promoted in one event with how fast as many users are in
// many events.
type RoomEvents struct {
	EventsOpened  int     `json:"events_opened"`
	OneEventS     float64 `json:"one_event_s"`     // from its opening until all users have a token
	SlowestEventS float64 `json:"slowest_event_s"` // from first opening until all users have one
	EventsRatio   float64 `json:"slowest_event_ratio"`
}

// RoomAbandon has the fraction of the slots that is used while half of the users close the tab at
// random times. TokenUtilisation is from another run, that of RoomUse, in which some users reload
// the page. A slot counts from its promotion on. A token counts from its receipt until its user
// begins to give the slot back, so its figures leave out the time of the promotion and of the call.
type RoomAbandon struct {
	TokenUtilisation        float64 `json:"token_utilisation"` // while some reload the page
	AbandonUtilisation      float64 `json:"abandon_utilisation"`
	AbandonTokenUtilisation float64 `json:"abandon_token_utilisation"`
	ClosedTabs              int     `json:"closed_tabs"`
}

// RoomBatches has the speed of the scripts enter and promote, called from 4 goroutines with 200
// users a call.
type RoomBatches struct {
	ScriptEnterPerSecond   float64 `json:"enter_per_second"`
	ScriptPromotePerSecond float64 `json:"promote_per_second"`
	ScriptEnterUS          float64 `json:"enter_redis_us_per_user"` // CPU of Redis
	ScriptPromoteUS        float64 `json:"promote_redis_us_per_user"`
}

// RoomParts returns the names of the parts of the benchmark, which RoomOptions.Only can choose.
func RoomParts() []string {
	return []string{"streams", "enter", "promotion", "empty", "kill", "events", "abandon", "scripts"}
}

// roomBench is one run of the benchmark.
type roomBench struct {
	RoomOptions
	*roomFleet
	eventCalls

	part        string // that is measured
	faults      RoomFaults
	violations  []string
	mostStreams int
}

// RunRoom measures the chosen parts one after the other, on the same brokers. The first error ends
// it; the parts that were measured before are returned. A violation is no error.
func RunRoom(ctx context.Context, o RoomOptions) (out Room, err error) {
	out = Room{
		Users: o.Users, Brokers: o.Brokers, Events: o.Events,
		Scripts: RoomScripts{CPUs: runtime.NumCPU(), Overrides: map[string]string{}}, Violations: []string{},
	}
	f, err := startRoom(ctx, o)
	if err != nil {
		return out, err
	}
	defer f.close()
	b := &roomBench{RoomOptions: o, roomFleet: f}
	if b.eventCalls, err = newEventCalls(f.fleet, "bulk-action:"); err != nil {
		return out, err
	}
	out.Scripts.Overrides = f.overrides
	for _, part := range RoomParts() {
		if len(o.Only) > 0 && !slices.Contains(o.Only, part) {
			continue
		}
		b.part = part
		if err = b.measurePart(ctx, &out); err != nil {
			err = fmt.Errorf("%s: %w", part, err)
			break
		}
		o.progress(part, 1, 1)
	}
	out.RoomFaults, out.Streams = b.faults, b.mostStreams
	out.Violations = append(out.Violations, b.violations...)
	return out, err
}

func (b *roomBench) measurePart(ctx context.Context, out *Room) (err error) {
	switch b.part {
	case "streams":
		out.RoomStreams, out.Scripts.RoomStreamCosts, err = b.streams(ctx)
	case "enter":
		out.RoomEnter, out.Scripts.RoomEnterCosts, err = b.enter(ctx)
	case "promotion":
		out.RoomPromotion, out.Scripts.RoomPromotionCosts, err = b.promotion(ctx)
	case "empty":
		out.Scripts.RoomEmpty, err = b.empty(ctx)
	case "kill":
		out.RoomReturns, out.Scripts.RoomKill, err = b.kill(ctx)
	case "events":
		out.Scripts.RoomEvents, err = b.manyEvents(ctx)
	case "abandon":
		out.RoomUse, out.Scripts.RoomAbandon, err = b.abandon(ctx)
	case "scripts":
		out.RoomMemory, out.Scripts.RoomBatches, err = b.batches(ctx)
	}
	return err
}

// mostRoomViolations is the largest number of violations that the result describes in words.
const mostRoomViolations = 100

// violatef notes a violation in the present part, unless mostRoomViolations are noted already.
func (b *roomBench) violatef(format string, args ...any) {
	if len(b.violations) < mostRoomViolations {
		b.violations = append(b.violations, b.part+": "+fmt.Sprintf(format, args...))
	}
}

// judge checks what the users of a task have received. It counts all violations, and describes the
// first ones. capacity is the number of slots of each event. With admitAll, users who still wait at
// the end count as lost.
func (b *roomBench) judge(a roomload.Answer, capacity int, admitAll bool) {
	for _, text := range a.Violations {
		b.violatef("%s", text)
	}
	if more := a.Wrong - len(a.Violations); more > 0 {
		b.violatef("%d more violations", more)
	}
	for _, v := range a.Visits {
		b.faults.PositionRises += v.Rises
		if v.Ended != "" && v.Admitted == 0 {
			b.violatef("user %s: the stream has ended: %s", v.User, v.Ended)
		}
	}
	for event, visits := range roomload.ByEvent(a.Visits) {
		if n := roomload.Inversions(visits); n > 0 {
			b.faults.OrderInversions += n
			b.violatef("event %s: %d users were promoted before a lower number", event, n)
		}
		if n := roomload.OverCapacity(visits, capacity); n > 0 {
			b.faults.OverCapacity += n
			b.violatef("event %s: %d tokens over the capacity of %d", event, n, capacity)
		}
		if users := roomload.Lost(visits, admitAll); len(users) > 0 {
			b.faults.Lost += len(users)
			b.violatef("event %s: %d users are lost, first %s", event, len(users), users[0])
		}
	}
}
