package chart

import (
	"fmt"
	"slices"
	"strings"
)

// Area is the part of a map that values of one class cover.
type Area struct {
	Name, Class string
	Path        string // the attribute d of a path
}

// Map is the geometry of a chart of columns, each divided among values from the bottom up.
type Map struct {
	Width, Height float64
	Areas         []Area // of the classes that the columns have, in the order of their first values
}

// NewMap returns a Map of columns of the same width. All parts of a class share one SVG path. Parts
// of a class at the same height in neighboring columns share one rectangle. So a map takes few
// bytes.
func NewMap(width, height float64, columns [][]Value) Map {
	m := Map{Width: width, Height: height}
	type part struct{ x, y, width, height float64 }
	parts := map[string][]part{}
	each := width / float64(max(len(columns), 1))
	for i, column := range columns {
		left := round(float64(i) * each)
		right := round(float64(i+1) * each)
		for _, p := range Divide(height, column) {
			if !slices.ContainsFunc(m.Areas, func(a Area) bool { return a.Class == p.Class }) {
				m.Areas = append(m.Areas, Area{Name: p.Name, Class: p.Class})
			}
			next := part{left, round(height - p.X - p.Width), right - left, p.Width}
			of := parts[p.Class]
			if n := len(of) - 1; n >= 0 {
				last := &of[n]
				if round(last.x+last.width) == left && last.y == next.y && last.height == next.height {
					last.width = right - last.x
					continue
				}
			}
			parts[p.Class] = append(of, next)
		}
	}
	for i, a := range m.Areas {
		var path strings.Builder
		for _, p := range parts[a.Class] {
			fmt.Fprintf(&path, "M%g %gh%gv%gh%gz", p.x, p.y, round(p.width), p.height, -round(p.width))
		}
		m.Areas[i].Path = path.String()
	}
	return m
}
