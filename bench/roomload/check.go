package roomload

import (
	"cmp"
	"slices"
)

// OverCapacity returns the number of tokens of one event that were received while at least capacity
// other tokens were valid. A token is valid from its receipt until its expiry and Leeway, or until
// its user gave the slot back.
func OverCapacity(visits []Visit, capacity int) (over int) {
	type edge struct {
		at     int64
		change int
	}
	var edges []edge
	for i := range visits {
		if visits[i].Admitted > 0 {
			t := visits[i].token()
			edges = append(edges, edge{t.From, 1}, edge{t.To, -1})
		}
	}
	slices.SortFunc(edges, func(a, b edge) int {
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.change, b.change))
	})
	valid := 0
	for _, e := range edges {
		if valid += e.change; e.change > 0 && valid > capacity {
			over++
		}
	}
	return over
}

const (
	// settling is how much later (µs) than the user a broker may notice the end of a stream.
	settling = 200_000
	// longestDelivery is the longest time (µs) from the promotion until a connected user has the
	// token. If the message about the promotion is lost, the broker's delivery check finds the user
	// after a second.
	longestDelivery = 3_000_000
)

// Inversions returns the number of users of one event who were promoted out of order: before
// another user who had a lower number and was present and waiting. If a number is unknown, the
// order of entering decides: a user whose enter was answered before the other one sent its request
// has the lower number.
func Inversions(visits []Visit) (n int) {
	byPromotion := slices.Clone(visits)
	slices.SortFunc(byPromotion, func(a, b Visit) int {
		if a.Fence == 0 || b.Fence == 0 {
			return cmp.Compare(b.Fence, a.Fence) // users who were not promoted come last
		}
		return cmp.Compare(a.Fence, b.Fence)
	})
	for i := range byPromotion {
		promoted := &byPromotion[i]
		if promoted.Fence == 0 {
			break
		}
		for k := i + 1; k < len(byPromotion); k++ {
			if later := &byPromotion[k]; hasLowerNumber(later, promoted) && later.presentAt(promoted.Fence) {
				n++
				break
			}
		}
	}
	return n
}

func hasLowerNumber(a, b *Visit) bool {
	if a.Number > 0 && b.Number > 0 {
		return a.Number < b.Number
	}
	return a.Entered > 0 && a.Entered < b.Sent
}

// presentAt says whether a user who had a number at the time at (µs) waited on an open stream then,
// and the stream stayed open for a while longer: for settling, or, without a token, for
// longestDelivery, because the user may have been promoted and have closed the tab before the token
// came.
func (v *Visit) presentAt(at int64) bool {
	until := at + settling
	if v.Admitted == 0 {
		until = at + longestDelivery
	}
	for i, s := range v.Streams {
		// The first stream counts from the moment of entering, which may be before its first frame.
		if (i == 0 || s.From <= at) && s.To >= until {
			return true
		}
	}
	return false
}

// Lost returns the users who neither got a token nor closed their tab. Unless admitAll is set, it
// leaves out users who still wait on an open stream.
func Lost(visits []Visit, admitAll bool) (users []string) {
	for _, v := range visits {
		if v.Admitted == 0 && !v.Closed && (admitAll || !v.Open || v.Entered == 0) {
			users = append(users, v.User)
		}
	}
	return users
}

// Utilisation returns the fraction of the capacity that users held as valid tokens, from the
// receipt of the first token to that of the last: until then somebody was waiting.
func Utilisation(visits []Visit, capacity int) float64 {
	var first, last, sum int64
	for _, v := range visits {
		if v.Admitted > 0 {
			last = max(last, v.Admitted)
			if first == 0 || v.Admitted < first {
				first = v.Admitted
			}
		}
	}
	if last == first || capacity == 0 {
		return 0
	}
	for i := range visits {
		if visits[i].Admitted > 0 {
			t := visits[i].token()
			sum += max(0, min(t.To, last)-t.From)
		}
	}
	return float64(sum) / float64(capacity) / float64(last-first)
}

// WrongPositions returns the users of the queue with an open stream whose last position is not the
// rank of their number among all numbers in the queue. Nobody may have been promoted for a second
// or more.
func WrongPositions(visits []Visit, numbers map[string]int64) (users []string) {
	queue := make([]int64, 0, len(numbers))
	for _, n := range numbers {
		queue = append(queue, n)
	}
	slices.Sort(queue)
	for _, v := range visits {
		n, waits := numbers[v.User]
		if !waits || !v.Open {
			continue
		}
		if lower, _ := slices.BinarySearch(queue, n); v.Position != int64(lower)+1 {
			users = append(users, v.User)
		}
	}
	return users
}

// Returns has what happened to users whose stream was broken.
type Returns struct {
	Users   int       // who lost a stream that they did not end themselves
	Back    int       // of them, users who were shown a position or the token on a later stream
	Kept    int       // of them, users whose place or token was kept
	Seconds []float64 // from the loss until a later stream showed the position or the token
	NotKept []string  // users
	NotBack []string  // users
}

// CheckReturns checks the users whose stream broke between from and to (µs). before and after have
// the numbers of the waiting users, read before the streams broke and after all users were back. A
// place is kept if the number is the same, or is missing because the user got a token, and if the
// first position on the new stream is not above the last one on the old stream.
func CheckReturns(visits []Visit, from, to int64, before, after map[string]int64) (r Returns) {
	for _, v := range visits {
		i := slices.IndexFunc(v.Streams, func(s Span) bool { return !s.Own && s.To >= from && s.To <= to })
		if i < 0 || v.Admitted > 0 && v.Admitted <= v.Streams[i].To {
			continue
		}
		r.Users++
		later := v.Streams[i+1:]
		shown := slices.IndexFunc(later, func(s Span) bool { return s.Shown > 0 })
		if shown < 0 {
			r.NotBack = append(r.NotBack, v.User)
			continue
		}
		r.Back++
		next := later[shown]
		r.Seconds = append(r.Seconds, float64(next.Shown-v.Streams[i].To)/1e6)
		number, waits := after[v.User]
		same := waits && number == before[v.User] || !waits && v.Admitted > 0
		if rose := next.First > next.Before && next.Before > 0; same && !rose {
			r.Kept++
		} else {
			r.NotKept = append(r.NotKept, v.User)
		}
	}
	return r
}
