package api

import "time"

// RejectedMessage is a message of an ingest stream that ingest could not accept.
type RejectedMessage struct {
	ID        string     `json:"id"`                   // of its entry in the stream ingest:rejected
	At        *time.Time `json:"at,omitempty"`         // when it was rejected
	Reason    string     `json:"reason"`               // why ingest could not accept it
	Entry     string     `json:"entry,omitempty"`      // its entry in the stream ingest, which is deleted
	MessageID string     `json:"message_id,omitempty"` // the id that its producer gave it
	Type      string     `json:"type,omitempty"`       // such as group.submit
	Bytes     int64      `json:"bytes"`                // length of its data as it is stored
	Data      string     `json:"data,omitempty"`       // its body, only if asked for; the end of a long one is cut off
}

// RejectedList is a page of rejected messages, newest first.
type RejectedList struct {
	Rejected []RejectedMessage `json:"rejected"`
	Cursor   string            `json:"cursor,omitempty"` // asks for the next page; empty on the last page
}
