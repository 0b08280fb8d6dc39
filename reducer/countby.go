package reducer

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"slices"
	"unicode/utf8"
)

// Bounds of the op count_by.
const (
	MaxKeys     = 1000        // keys in the aggregate, besides OtherKey
	MaxKeyBytes = 128         // bytes of a key
	OtherKey    = "__other__" // the key that counts the values of all other keys
)

// countByFold is the partial state of the op count_by. It keeps the counts of the first MaxKeys of
// all keys that it has seen, in the order of keyOrder. Merging is exact: a key that is among the
// first of all is among the first of each partial state, so no partial state ever drops its count.
// It may hold nearly twice as many keys: prune removes them then, and before the state is read.
type countByFold struct {
	Counts map[string]*int64 `json:"counts"`
	Other  int64             `json:"other"`
}

// keyOrder orders short keys before long ones, since short values are more often categories than
// free text.
func keyOrder(a, b string) int {
	return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
}

func (f *countByFold) add(_ int64, v *value) bool {
	var scratch [64]byte
	key, ok := keyOf(v, scratch[:0])
	if !ok {
		return false
	}
	if n := f.Counts[string(key)]; n != nil { // the common case: no copy of the key
		*n++
		return true
	}
	f.addKey(string(key), 1)
	return true
}

func (f *countByFold) addKey(key string, count int64) {
	if key == OtherKey {
		f.Other += count
		return
	}
	if n := f.Counts[key]; n != nil {
		*n += count
		return
	}
	f.Counts[key] = new(count)
	if len(f.Counts) >= 2*MaxKeys {
		f.prune()
	}
}

func (f *countByFold) prune() {
	if len(f.Counts) <= MaxKeys {
		return
	}
	keys := slices.SortedFunc(maps.Keys(f.Counts), keyOrder)
	for _, key := range keys[MaxKeys:] {
		f.Other += *f.Counts[key]
		delete(f.Counts, key)
	}
}

func (f *countByFold) merge(other fold) {
	o := other.(*countByFold)
	f.Other += o.Other
	for key, n := range o.Counts {
		f.addKey(key, *n)
	}
}

func (f *countByFold) MarshalJSON() ([]byte, error) {
	f.prune()
	type plain countByFold
	return json.Marshal((*plain)(f))
}

func (f *countByFold) value() json.RawMessage {
	f.prune()
	shown := make(map[string]int64, len(f.Counts)+1)
	for key, n := range f.Counts {
		shown[key] = *n
	}
	if f.Other > 0 {
		shown[OtherKey] = f.Other
	}
	b, err := json.Marshal(shown)
	if err != nil {
		return null()
	}
	return b
}

func (f *countByFold) check() error {
	if !validCount(f.Other) || f.Counts == nil || len(f.Counts) > MaxKeys {
		return errCount
	}
	for key, n := range f.Counts {
		if n == nil || *n <= 0 || !validCount(*n) || len(key) > MaxKeyBytes || key == OtherKey {
			return errCount
		}
	}
	return nil
}

// keyOf returns the key under which count_by counts a string, number or boolean; false for any
// other value. The key may be stored in scratch.
func keyOf(v *value, scratch []byte) ([]byte, bool) {
	switch v.raw[0] {
	case '"':
		text, ok := v.text()
		return bounded(text), ok
	case 't', 'f':
		return v.raw, string(v.raw) == "true" || string(v.raw) == "false"
	}
	n, ok := v.number()
	if !ok {
		return nil, false
	}
	return bounded(n.append(scratch)), true
}

// bounded shortens a long key to MaxKeyBytes without splitting a character, and ends it in "…".
func bounded(key []byte) []byte {
	const mark = "…"
	if len(key) <= MaxKeyBytes {
		return key
	}
	end := MaxKeyBytes - len(mark)
	for end > 0 && !utf8.RuneStart(key[end]) {
		end--
	}
	return append(bytes.Clone(key[:end]), mark...)
}
