package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
)

// pages iterates over the items of a list that the server returns in pages.
func pages[P, T any](
	ctx context.Context, a *API, c apiCall, split func(P) (items []T, cursor string),
) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		c := c
		c.query = maps.Clone(c.query)
		for {
			page, err := doJSON[P](ctx, a, c)
			if err != nil {
				yield(none, err)
				return
			}
			items, cursor := split(page)
			for _, item := range items {
				if !yield(item, nil) {
					return
				}
			}
			if cursor == "" {
				return
			}
			c.query.Set("cursor", cursor)
		}
	}
}

// streamLines iterates over the NDJSON lines of a group's results or failures.
func streamLines[T any](ctx context.Context, a *API, group, list string) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		path, err := groupPath(group, "/"+list)
		if err != nil {
			yield(none, err)
			return
		}
		c := apiCall{action: "get " + list + " of group " + group, path: path, stream: true, retry: retryAlways}
		resp, err := a.do(ctx, c)
		if err != nil {
			yield(none, err)
			return
		}
		defer resp.Body.Close() // not drained: the rest may be long
		d := json.NewDecoder(resp.Body)
		for {
			var v T
			err := d.Decode(&v)
			if errors.Is(err, io.EOF) {
				return
			}
			if err != nil {
				yield(none, fmt.Errorf("%s: %w", c.action, err))
				return
			}
			if !yield(v, nil) {
				return
			}
		}
	}
}
