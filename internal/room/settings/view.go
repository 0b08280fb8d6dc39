package settings

import (
	"time"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

// View is an event as the API shows it to operators. Its settings can be sent back unchanged. The
// capacity is missing until the seat service has answered.
func View(s waitingroom.Snapshot) api.RoomEvent {
	set := s.Settings
	v := api.RoomEvent{
		Event: s.Event,
		Rev:   s.Rev,
		EventSettings: api.EventSettings{
			Stock:      set.Stock,
			MaxWaiting: &set.MaxWaiting,
			TokenTTL:   duration(set.TokenTTL),
			Leeway:     duration(set.Leeway),
			MaxSession: duration(set.MaxSession),
			Ready:      duration(set.Ready),
			Grace:      duration(set.Grace),
			OnClose:    set.OnClose,
			NoShow:     set.NoShow,
			Mode:       set.Mode,
			ReturnURL:  set.ReturnURL,
			Retention:  duration(set.Retention),
		},
		Slots:    api.EventSlots{Capacity: set.Capacity, Used: s.Used, Free: s.Free, Stock: s.Left},
		Waiting:  s.Waiting,
		Away:     s.Away,
		Tail:     s.Tail,
		Counters: s.Counters,
	}
	if !set.SeatsPending {
		v.Capacity = &set.Capacity
	}
	if set.Rate > 0 {
		v.Rate, v.Burst = &set.Rate, set.Burst
	}
	limit := set.Capacity
	if s.Left != nil {
		limit = min(limit, *s.Left)
	}
	v.Over = max(0, s.Used-limit)
	return v
}

func duration(d time.Duration) *api.Duration {
	v := api.Duration(d)
	return &v
}
