package main

import (
	"fmt"
	"html"
	"math"
	"strings"
)

// series is one line of a chart, or one bar in each group of bars.
type series struct {
	name   string
	values []float64 // NaN: no value
}

// chart is an SVG picture with one vertical axis that begins at 0. It must have series and, if it
// draws bars, labels.
type chart struct {
	title, subtitle string
	x, y            string   // titles of the axes
	labels          []string // of groups of bars, or of a line's points; "" shows none
	series          []series // the first has the first of the colours
	goals           []goal   // horizontal dashed lines
	lines           bool     // draw lines, not bars
	steps           bool     // lines keep a value until the next point
	format          string   // of the numbers above bars; "" shows none
}

// goal is a value that a measurement should reach.
type goal struct {
	name  string
	value float64
}

const (
	width, height = 720.0, 380.0
	left, right   = 70.0, 20.0
	top, bottom   = 84.0, 60.0
	plotW, plotH  = width - left - right, height - top - bottom
)

var colours = []string{"#2563eb", "#f59e0b", "#10b981", "#a855f7", "#ef4444"}

// canvas collects the elements of a picture.
type canvas struct{ strings.Builder }

func (c *canvas) add(format string, args ...any) { fmt.Fprintf(c, format+"\n", args...) }

func (c *canvas) text(x, y float64, anchor, style, s string) {
	c.add(`<text x="%.1f" y="%.1f" text-anchor="%s" %s>%s</text>`, x, y, anchor, style, html.EscapeString(s))
}

// svg returns the chart as an SVG document.
func (c chart) svg() string {
	out := &canvas{}
	out.add(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %g %g" width="%g" height="%g" `+
		`font-family="system-ui, sans-serif" font-size="12" fill="#334155" role="img" aria-label="%s">`,
		width, height, width, height, html.EscapeString(c.title))
	out.add(`<rect width="%g" height="%g" fill="#ffffff"/>`, width, height)
	out.text(left, 26, "start", `font-size="16" font-weight="600" fill="#0f172a"`, c.title)
	out.text(left, 44, "start", `fill="#64748b"`, c.subtitle)
	most := c.axis(out)
	y := func(v float64) float64 { return top + plotH*(1-v/most) }
	if c.lines {
		c.drawLines(out, y)
	} else {
		c.drawBars(out, y)
	}
	for _, g := range c.goals {
		out.add(`<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="#dc2626" stroke-dasharray="6 4"/>`,
			left, y(g.value), left+plotW, y(g.value))
		out.text(left+plotW, y(g.value)-5, "end", `fill="#dc2626"`, g.name)
	}
	c.legend(out)
	out.text(left+plotW/2, height-12, "middle", "", c.x)
	out.add(`<text transform="translate(16 %.1f) rotate(-90)" text-anchor="middle">%s</text>`,
		top+plotH/2, html.EscapeString(c.y))
	out.add(`</svg>`)
	return out.String()
}

// axis draws the vertical axis of the chart with its grid lines, and returns the value at the top
// of the axis.
func (c chart) axis(out *canvas) float64 {
	most := 0.0
	for _, s := range c.series {
		for _, v := range s.values {
			if !math.IsNaN(v) {
				most = max(most, v)
			}
		}
	}
	for _, g := range c.goals {
		most = max(most, g.value)
	}
	step := roundStep(most / 5)
	most = step * math.Ceil(most*1.08/step)
	for v := 0.0; v <= most+step/2; v += step {
		y := top + plotH*(1-v/most)
		out.add(`<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="#e2e8f0"/>`, left, y, left+plotW, y)
		out.text(left-8, y+4, "end", "", formatNumber(v))
	}
	return most
}

// roundStep rounds the distance between two numbers on an axis up to 1, 2, 5 or 10 times a power of
// ten.
func roundStep(x float64) float64 {
	if x <= 0 {
		return 1
	}
	power := math.Pow(10, math.Floor(math.Log10(x)))
	for _, f := range []float64{1, 2, 5} {
		if x <= f*power {
			return f * power
		}
	}
	return 10 * power
}

func formatNumber(v float64) string {
	s := fmt.Sprintf("%.4f", v)
	return strings.TrimSuffix(strings.TrimRight(s, "0"), ".")
}

func (c chart) drawBars(out *canvas, y func(float64) float64) {
	slot := plotW / float64(len(c.labels))
	bar := min(46, slot*0.8/float64(len(c.series)))
	for i, label := range c.labels {
		middle := left + slot*(float64(i)+0.5)
		from := middle - bar*float64(len(c.series))/2
		for k, s := range c.series {
			if i >= len(s.values) || math.IsNaN(s.values[i]) {
				continue
			}
			v := s.values[i]
			x := from + bar*float64(k)
			out.add(`<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"><title>%s: %s</title></rect>`,
				x+1, y(v), bar-2, top+plotH-y(v), colours[k%len(colours)],
				html.EscapeString(s.name), formatNumber(v))
			if c.format != "" {
				out.text(x+bar/2, y(v)-4, "middle", `font-size="10"`, fmt.Sprintf(c.format, v))
			}
		}
		for k, line := range strings.Split(label, "\n") {
			out.text(middle, top+plotH+16+14*float64(k), "middle", "", line)
		}
	}
}

func (c chart) drawLines(out *canvas, y func(float64) float64) {
	points := 0
	for _, s := range c.series {
		points = max(points, len(s.values))
	}
	end := 1.0
	if points > 1 {
		end = float64(points - 1)
	}
	x := func(i int) float64 { return left + plotW*float64(i)/end }
	for k, s := range c.series {
		var path strings.Builder
		for i, v := range s.values {
			if math.IsNaN(v) {
				continue
			}
			if path.Len() > 0 && c.steps {
				fmt.Fprintf(&path, " H%.1f V%.1f", x(i), y(v))
				continue
			}
			verb := " L"
			if path.Len() == 0 {
				verb = "M"
			}
			fmt.Fprintf(&path, "%s%.1f %.1f", verb, x(i), y(v))
		}
		out.add(`<path d="%s" fill="none" stroke="%s" stroke-width="2" stroke-linejoin="round"/>`,
			path.String(), colours[k%len(colours)])
	}
	for i, label := range c.labels {
		if label != "" {
			out.text(x(i), top+plotH+16, "middle", "", label)
		}
	}
}

func (c chart) legend(out *canvas) {
	x := left
	for k, s := range c.series {
		if s.name == "" {
			continue
		}
		out.add(`<rect x="%.1f" y="56" width="12" height="12" rx="2" fill="%s"/>`, x, colours[k%len(colours)])
		out.text(x+17, 66, "start", "", s.name)
		x += 34 + 6.4*float64(len([]rune(s.name)))
	}
}
