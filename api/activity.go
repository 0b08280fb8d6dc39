package api

import (
	"encoding/json"
	"time"
)

// Activity is one entry of the activity log: somebody changed something, or tried to.
type Activity struct {
	ID        string    `json:"id"` // of its entry in the stream activity
	At        time.Time `json:"at"`
	Actor     string    `json:"actor"`                // id of the API key, cli:USER, or anonymous: no authentication
	Role      string    `json:"role,omitempty"`       // of the key
	Via       string    `json:"via"`                  // one of the constants Via…
	IP        string    `json:"ip,omitempty"`         // of the client
	RequestID string    `json:"request_id,omitempty"` // X-Request-Id of the call
	Action    string    `json:"action"`               // such as group.cancel
	Object    string    `json:"object"`               // what was changed: its id, or user@event
	Tenant    string    `json:"tenant,omitempty"`     // the key's; absent: the key belongs to no tenant
	// Before and After are values of the changed object, such as its settings, before and after the
	// action, as far as they are known. Each is absent if it has more than 8 KiB.
	Before json.RawMessage `json:"before,omitempty"`
	After  json.RawMessage `json:"after,omitempty"`
	// Outcome is empty in the entry that is stored before the action. If the action fails, a second
	// entry has the error here, and the same request id if there is one. That entry can be lost.
	Outcome string `json:"outcome,omitempty"`
}

// Values of Activity.Via: how a change was asked for.
const (
	ViaAPI  = "api"
	ViaUI   = "ui"
	ViaCLI  = "cli" // a command that writes to Redis directly
	ViaFile = "file"
)

// ActivityList is a page of the activity log, newest first.
type ActivityList struct {
	Activity []Activity `json:"activity"`
	// Cursor asks for the next page; empty on the last page. One call looks at 10,000 entries at
	// most, so a filtered page may be short, or empty, although it has a cursor.
	Cursor  string `json:"cursor,omitempty"`
	Scanned int    `json:"scanned"` // entries that this call has looked at
}
