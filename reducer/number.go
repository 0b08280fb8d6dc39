package reducer

import (
	"bytes"
	"cmp"
	"errors"
	"math/big"
	"strconv"
	"strings"
)

// Bounds of a number. With at most maxMagnitude digits before the point, the sum over a group's
// jobs stays within float64's range, for clients that read it as a float64. minExponent bounds the
// length of an exact sum.
const (
	maxMagnitude = 300
	minExponent  = -400
	smallDigits  = 18 // numbers with this many digits always fit an int64
	// Numbers in a stored state may be larger, since they include sums of squares, but not
	// unbounded.
	maxStateDigits   = 2000
	maxStateExponent = 2000
)

var errNotNumber = errors.New("it is not a number within bounds")

// number is an exact decimal: m·10^exp, or wide·10^exp if the digits don't fit m. Nearly all
// numbers fit m, so most arithmetic is that of int64; BenchmarkAdd measures it. wide is never
// changed after it is set, so copies may share it.
type number struct {
	m    int64
	exp  int
	wide *big.Int
}

// parseNumber parses a number of a job's result. It refuses text that is not a JSON number, and
// numbers that are too large. A number with digits below 10^minExponent is rounded to the nearest
// float64.
func parseNumber(text []byte) (number, bool) {
	n, digits, ok := readNumber(text)
	switch {
	case !ok || digits+n.exp > maxMagnitude:
		return number{}, false
	case digits == 0:
		return number{}, true
	case n.exp >= minExponent:
		return n.withDigits(text, digits), true
	}
	f, err := strconv.ParseFloat(string(text), 64)
	if err != nil {
		return number{}, false
	}
	return parseNumber(strconv.AppendFloat(nil, f, 'e', -1, 64))
}

// readNumber parses text by JSON's grammar. n.m is right if there are at most smallDigits digits,
// leading zeros not counted; zero has no digits.
func readNumber(text []byte) (n number, digits int, ok bool) {
	i, end := 0, len(text)
	negative := end > 0 && text[0] == '-'
	if negative {
		i++
	}
	push := func() (count int) {
		for start := i; ; i++ {
			if i == end || text[i]-'0' > 9 {
				return i - start
			}
			if digits > 0 || text[i] != '0' {
				digits++
			}
			if digits <= smallDigits {
				n.m = n.m*10 + int64(text[i]-'0')
			}
		}
	}
	first := i
	if whole := push(); whole == 0 || whole > 1 && text[first] == '0' {
		return number{}, 0, false
	}
	if i < end && text[i] == '.' {
		i++
		fraction := push()
		if fraction == 0 {
			return number{}, 0, false
		}
		n.exp = -fraction
	}
	if i < end && text[i]|0x20 == 'e' {
		exp, ok := readExponent(text[i+1:])
		if !ok {
			return number{}, 0, false
		}
		n.exp += exp
		i = end
	}
	if negative {
		n.m = -n.m
	}
	return n, digits, i == end
}

func readExponent(text []byte) (exp int, ok bool) {
	sign := 1
	if len(text) > 0 && (text[0] == '+' || text[0] == '-') {
		if text[0] == '-' {
			sign = -1
		}
		text = text[1:]
	}
	for _, c := range text {
		if c -= '0'; c > 9 {
			return 0, false
		}
		if exp < 1e8 { // already beyond every bound
			exp = exp*10 + int(c)
		}
	}
	return sign * exp, len(text) > 0
}

// withDigits returns n with the digits in text. It sets wide if there are too many digits for m.
func (n number) withDigits(text []byte, digits int) number {
	if digits <= smallDigits {
		return n
	}
	var mantissa strings.Builder
	for _, c := range text {
		if c|0x20 == 'e' {
			break
		}
		if c != '.' {
			mantissa.WriteByte(c)
		}
	}
	n.m = 0
	n.wide, _ = new(big.Int).SetString(mantissa.String(), 10)
	return n
}

// bigMantissa returns the mantissa. The caller must not change it.
func (n number) bigMantissa() *big.Int {
	if n.wide != nil {
		return n.wide
	}
	return big.NewInt(n.m)
}

func (n number) sign() int {
	if n.wide != nil {
		return n.wide.Sign()
	}
	return cmp.Compare(n.m, 0)
}

func (n number) cmp(o number) int {
	if n.wide == nil && o.wide == nil {
		if a, b, ok := align(n, o); ok {
			return cmp.Compare(a, b)
		}
	}
	if s, t := n.sign(), o.sign(); s != t {
		return s - t // only its sign matters
	}
	exp := min(n.exp, o.exp)
	return scaled(n.bigMantissa(), n.exp-exp).Cmp(scaled(o.bigMantissa(), o.exp-exp))
}

// align converts two numbers without wide to the smaller exponent of the two. ok is false if one of
// them then doesn't fit an int64.
func align(n, o number) (a, b int64, ok bool) {
	if n.exp == o.exp {
		return n.m, o.m, true
	}
	if n.exp > o.exp {
		a, ok = scaleInt(n.m, n.exp-o.exp)
		return a, o.m, ok
	}
	b, ok = scaleInt(o.m, o.exp-n.exp)
	return n.m, b, ok
}

// float returns the nearest float64.
func (n number) float() float64 {
	// The mantissa and the power of ten are both exact as float64, so only the multiplication or
	// division rounds (Clinger 1990).
	if n.wide == nil && n.m > -1<<53 && n.m < 1<<53 {
		switch {
		case n.exp == 0:
			return float64(n.m)
		case n.exp > 0 && n.exp < len(floatPow10):
			return float64(n.m) * floatPow10[n.exp]
		case n.exp < 0 && -n.exp < len(floatPow10):
			return float64(n.m) / floatPow10[-n.exp]
		}
	}
	f, _ := strconv.ParseFloat(string(n.append(nil)), 64) // ±Inf outside of float64's range
	return f
}

func (n number) rat() *big.Rat {
	r := new(big.Rat).SetInt(n.bigMantissa())
	if n.exp >= 0 {
		return r.Mul(r, new(big.Rat).SetInt(pow10(n.exp)))
	}
	return r.Quo(r, new(big.Rat).SetInt(pow10(-n.exp)))
}

// append appends the number with all its digits to dst. Equal numbers give equal text.
func (n number) append(dst []byte) []byte {
	var buffer [20]byte
	var digits []byte
	if n.wide != nil {
		digits = n.wide.Append(nil, 10)
	} else {
		digits = strconv.AppendInt(buffer[:0], n.m, 10)
	}
	if digits[0] == '-' {
		dst, digits = append(dst, '-'), digits[1:]
	}
	trimmed := bytes.TrimRight(digits, "0")
	if len(trimmed) == 0 {
		return append(dst, '0')
	}
	exp := n.exp + len(digits) - len(trimmed)
	point := len(trimmed) + exp // number of digits before the point
	switch {
	case exp >= 0 && exp <= 21:
		return append(append(dst, trimmed...), strings.Repeat("0", exp)...)
	case exp < 0 && point > 0:
		return append(append(append(dst, trimmed[:point]...), '.'), trimmed[point:]...)
	case exp < 0 && point > -6:
		return append(append(append(dst, "0."...), strings.Repeat("0", -point)...), trimmed...)
	}
	dst = append(dst, trimmed[0])
	if len(trimmed) > 1 {
		dst = append(append(dst, '.'), trimmed[1:]...)
	}
	return strconv.AppendInt(append(dst, 'e'), int64(point-1), 10)
}

func (n number) MarshalJSON() ([]byte, error) { return n.append(nil), nil }

func (n *number) UnmarshalJSON(text []byte) error {
	read, digits, ok := readNumber(text)
	if !ok || digits > maxStateDigits || read.exp > maxStateExponent || read.exp < -maxStateExponent {
		return errNotNumber
	}
	*n = read.withDigits(text, digits)
	return nil
}

var (
	floatPow10 = [...]float64{
		1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13,
		1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22,
	}
	intPow10 = [...]int64{
		1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18,
	}
	bigPow10 = func() (powers [40]*big.Int) {
		for i := range powers {
			powers[i] = new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(i)), nil)
		}
		return powers
	}()
)

// scaleInt returns m·10^exp if that fits an int64.
func scaleInt(m int64, exp int) (int64, bool) {
	if m == 0 || exp == 0 {
		return m, true
	}
	if exp >= len(intPow10) {
		return 0, false
	}
	p := intPow10[exp]
	scaled := m * p
	return scaled, scaled/p == m
}

// pow10 returns 10^exp. The caller must not change it.
func pow10(exp int) *big.Int {
	if exp < len(bigPow10) {
		return bigPow10[exp]
	}
	return new(big.Int).Exp(big.NewInt(10), big.NewInt(int64(exp)), nil)
}

// scaled returns x·10^exp; it returns x itself if exp is 0.
func scaled(x *big.Int, exp int) *big.Int {
	if exp == 0 {
		return x
	}
	return new(big.Int).Mul(x, pow10(exp))
}
