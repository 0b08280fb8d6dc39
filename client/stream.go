package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"maps"
	"net/http"
	"net/url"
	"strings"
)

// pages iterates over the items of a list that the server returns in pages. what names the list in
// errors, and in the path with - for spaces. split returns the items and the cursor of a page.
func pages[P, T any](
	ctx context.Context, t *transport, what string, query url.Values, split func(P) (items []T, cursor string),
) iter.Seq2[T, error] {
	c := apiCall{action: "list " + what, method: http.MethodGet, path: "/v1/" + strings.ReplaceAll(what, " ", "-")}
	return pagesOf(ctx, t, c, query, split)
}

// pagesOf is pages for any call that returns pages.
func pagesOf[P, T any](
	ctx context.Context, t *transport, call apiCall, query url.Values, split func(P) (items []T, cursor string),
) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		c := call
		c.query = maps.Clone(query)
		for {
			page, err := doJSON[P](ctx, t, c)
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

// streamLines iterates over the NDJSON lines of a group's results or failures. list is the end of
// the path, and may have a query.
func streamLines[T any](ctx context.Context, t *transport, group, list string) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var none T
		list, query, _ := strings.Cut(list, "?")
		c := callOn("get "+list+" of", http.MethodGet, "group", group, "/"+list)
		c.stream = true
		c.query, _ = url.ParseQuery(query) // a constant of this package
		resp, err := t.do(ctx, c)
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
