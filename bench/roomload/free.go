package roomload

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"
)

// free gives the user's slot back: with a call of the API, as a shop makes it, or by leaving at a
// broker.
func (v *visitor) free(ctx context.Context) {
	if v.visit.Freed = time.Now().UnixMicro(); v.KeepOpen {
		v.visit.Freed = v.actedAt // the end of the stream may have done it
	}
	var err error
	if v.API != "" {
		err = v.complete(ctx)
	} else {
		err = v.leaveAt(ctx)
	}
	if err != nil && ctx.Err() == nil && time.Now().Before(time.UnixMicro(v.visit.Expires)) {
		v.wrong.addf("user %s: give the slot back: %v", v.visit.User, err)
	}
}

// complete ends the session as the shop does.
func (v *visitor) complete(ctx context.Context) error {
	body, err := json.Marshal(map[string]any{"token": v.token, "sold": false})
	if err != nil {
		return err
	}
	url := v.API + "/v1/entry-tokens/complete"
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := v.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("complete: %s", resp.Status)
	}
	var answer struct{ Done bool }
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		return fmt.Errorf("complete: %w", err)
	}
	if !answer.Done && !v.KeepOpen { // the end of an open stream may have given the slot back
		return errors.New("complete: the token is gone before its expiry")
	}
	return nil
}

// leaveAt leaves at the next broker that answers.
func (v *visitor) leaveAt(ctx context.Context) (err error) {
	for range v.Brokers {
		url := "http://" + v.Brokers[v.broker%len(v.Brokers)] + "/events/" + v.visit.Event + "/ticket"
		v.broker++
		var req *http.Request
		if req, err = http.NewRequestWithContext(ctx, http.MethodDelete, url, http.NoBody); err != nil {
			return err
		}
		req.Header.Set(v.Header, v.visit.User)
		var resp *http.Response
		if resp, err = v.client.Do(req); err != nil {
			continue
		}
		if resp.Body.Close(); resp.StatusCode != http.StatusNoContent {
			return fmt.Errorf("leave: %s", resp.Status)
		}
		return nil
	}
	return err
}
