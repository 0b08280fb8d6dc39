package keyspace

import "strings"

// RoomKeys are the keys of the waiting room (package waitingroom). Their scripts are in lua/room.
type RoomKeys string

// Room is a hash: the settings of an event, its last number, its change number, the state of its
// limiter and its counters (all scripts of the event).
func (k RoomKeys) Room(event string) string { return string(k) + "room:" + event }

// RoomWaiting is a sorted set: the users of an event who are waiting, by number.
func (k RoomKeys) RoomWaiting(event string) string { return k.Room(event) + ":waiting" }

// RoomAway is a sorted set: users who are away, and waiting users who poll, by the time (ms) until
// which their places are kept.
func (k RoomKeys) RoomAway(event string) string { return k.Room(event) + ":away" }

// RoomSlots is a sorted set: the users who hold a slot, by the time (ms) until which they hold it.
func (k RoomKeys) RoomSlots(event string) string { return k.Room(event) + ":slots" }

// RoomUsers is a hash: user → record. lua/room/README.md describes records.
func (k RoomKeys) RoomUsers(event string) string { return k.Room(event) + ":users" }

// Rooms is a sorted set: events by the time (ms) when something is due there.
func (k RoomKeys) Rooms() string { return string(k) + "rooms" }

// RoomCleanup is a hash: when the script expire_users last ran, the end of a hold of places, which
// begins when it did not run for a while, and how often the clock has stepped back.
func (k RoomKeys) RoomCleanup() string { return string(k) + "cleanup" }

// RoomSweep is a string: the broker process that runs the room sweep now, which moves the waiting
// users of dead brokers to away.
func (k RoomKeys) RoomSweep() string { return string(k) + "sweep" }

// Entry is a stream: the messages entry.promoted, which the router hands to the brokers.
func (k RoomKeys) Entry() string { return string(k) + "entry" }

// Moves is a stream: the numbers that have left the queues of events.
func (k RoomKeys) Moves() string { return string(k) + "moves" }

// OfEvent returns the partition that holds all keys of an event.
func (s Space) OfEvent(event string) Partition { return s.Partition(s.index(event)) }

// Dispatch is a stream: messages for the broker process of an instance.
func (s Space) Dispatch(instance string) string { return s.prefix + "dispatch:" + instance }

// Brokers is a hash: the statuses of broker processes, by instance.
func (s Space) Brokers() string { return s.prefix + "brokers" }

// InstanceOf returns the instance of the broker that made a conn, "" for a conn of another form.
func InstanceOf(conn string) string {
	i := strings.LastIndexByte(conn, '.')
	if i < 0 {
		return ""
	}
	return conn[:i]
}
