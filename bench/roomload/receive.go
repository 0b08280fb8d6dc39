package roomload

import (
	"encoding/json"
	"fmt"
	"time"
)

// receive handles a frame of the present stream; at is the time of its receipt.
func (v *visitor) receive(f frame, at time.Time) {
	v.ages.frames.Add(1)
	us := at.UnixMicro()
	if !v.hasSpan {
		v.hasSpan, v.span.From = true, us
		v.counts.open.Add(1)
		if v.visit.Entered == 0 {
			v.visit.Entered = us
			v.counts.entered.Add(1)
		}
		if f.Event == "position" || f.Event == "admitted" {
			v.wrong.addf("user %s: the first frame is %s", v.visit.User, f.Event)
		}
	}
	var err error
	switch f.Event {
	case "state":
		var s struct{ State, Mode string }
		if err = json.Unmarshal(f.Data, &s); err == nil && (s.State == "" || s.Mode == "") {
			err = fmt.Errorf("no state or mode in %s", f.Data)
		}
	case "position":
		err = v.receivePosition(f.Data, at)
	case "admitted":
		err = v.receiveToken(f.Data, at)
	case "ended":
		var e struct{ Reason string }
		err = json.Unmarshal(f.Data, &e)
		if v.visit.Ended = e.Reason; f.ID != "ended" {
			err = fmt.Errorf("the id of ended is %q", f.ID)
		}
	case "reconnect": // then the server closes
	default:
		err = fmt.Errorf("unknown frame %q", f.Event)
	}
	if err != nil {
		v.wrong.addf("user %s: %s: %v", v.visit.User, f.Event, err)
	}
}

func (v *visitor) receivePosition(data []byte, at time.Time) error {
	var p struct {
		Position, Total int64
		At              time.Time
	}
	if err := json.Unmarshal(data, &p); err != nil {
		return err
	}
	if p.Position < 1 || p.Total < p.Position || p.At.IsZero() {
		return fmt.Errorf("impossible values: %s", data)
	}
	v.ages.add(at.Sub(p.At))
	v.show(at)
	if v.span.First == 0 {
		v.span.First = p.Position
	}
	if v.visit.Position > 0 && p.Position > v.visit.Position {
		if v.visit.Rises++; v.visit.Rises == 1 {
			v.wrong.addf("user %s: the position rises from %d to %d", v.visit.User, v.visit.Position, p.Position)
		}
	}
	v.visit.Position = p.Position
	if v.visit.Admitted > 0 {
		return fmt.Errorf("a user with a token is shown position %d", p.Position)
	}
	return nil
}

// show notes that the stream has shown where the user stands.
func (v *visitor) show(at time.Time) {
	if v.span.Shown == 0 {
		v.span.Shown = at.UnixMicro()
		v.counts.shown.Add(1)
	}
}

func (v *visitor) receiveToken(data []byte, at time.Time) error {
	var t struct {
		Token     string
		ExpiresAt time.Time `json:"expires_at"`
	}
	if err := json.Unmarshal(data, &t); err != nil {
		return err
	}
	fence, expires, err := v.keys.verify(t.Token, v.visit.User, v.visit.Event, at)
	if err != nil {
		return err
	}
	if d := t.ExpiresAt.Sub(time.UnixMicro(expires)); d < 0 || d >= time.Second {
		err = fmt.Errorf("expires_at is %s later than exp", d)
	}
	v.show(at)
	if v.visit.Admitted > 0 {
		if v.visit.Fence != fence {
			err = fmt.Errorf("a second token: fence %d after %d", fence, v.visit.Fence)
		}
		return err
	}
	v.visit.Admitted, v.visit.Fence, v.visit.Expires = at.UnixMicro(), fence, expires
	v.token = t.Token
	v.counts.admitted.Add(1)
	v.mu.Lock()
	v.holds = true
	v.mu.Unlock()
	if v.KeepOpen && v.session > 0 {
		v.doAfter(v.session, leave)
	}
	return err
}
