package stream

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzDecodeBatches: a reply of any shape is either refused with an error or decoded into one batch
// for each of its elements.
func FuzzDecodeBatches(f *testing.F) {
	f.Add([]byte("[[s[[1-1[ab]][2-0[]]]]]"))
	f.Add([]byte("[[s[[1-1n]n]]]"))
	f.Add([]byte("[[s]]"))
	f.Add([]byte("n"))
	f.Fuzz(func(t *testing.T, shape []byte) {
		reply, _ := build(shape, 0)
		batches, err := decodeBatches(reply)
		if err != nil {
			require.Nil(t, batches)
			return
		}
		require.Len(t, batches, len(reply.([]any)))
		for _, b := range batches {
			for _, e := range b.Entries {
				e.Get("a")
			}
		}
	})
}

// build returns a reply from its text form: [ and ] enclose an array, n is nil, 1 is a number, and
// any other character is a string of this character.
func build(shape []byte, depth int) (any, []byte) {
	if len(shape) == 0 || depth > 8 {
		return nil, nil
	}
	head, rest := shape[0], shape[1:]
	switch head {
	case '[':
		list := []any{}
		for len(rest) > 0 && rest[0] != ']' {
			var v any
			v, rest = build(rest, depth+1)
			list = append(list, v)
		}
		if len(rest) > 0 {
			rest = rest[1:]
		}
		return list, rest
	case 'n', ']':
		return nil, rest
	case '1':
		return int64(1), rest
	}
	return string(head), rest
}
