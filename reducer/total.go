package reducer

import (
	"math/big"
	"math/bits"
)

// total is an exact sum of decimals: small·10^exp + wide·10^wideExp. The first part is for speed
// (BenchmarkAdd/sum measures it), and overflows into the second.
type total struct {
	small   int64
	exp     int
	wide    big.Int
	wideExp int
	term    big.Int // scratch
	factor  big.Int // scratch
}

func (t *total) add(n *number) {
	if n.wide != nil {
		t.addWide(t.term.Set(n.wide), n.exp)
		return
	}
	t.addSmall(n.m, n.exp)
}

// addSquare adds n².
func (t *total) addSquare(n *number) {
	if n.wide != nil {
		t.addWide(t.term.Mul(n.wide, n.wide), 2*n.exp)
		return
	}
	m := max(n.m, -n.m)
	if high, low := bits.Mul64(uint64(m), uint64(m)); high == 0 && low < 1<<63 {
		t.addSmall(int64(low), 2*n.exp)
		return
	}
	t.factor.SetInt64(m)
	t.addWide(t.term.Mul(&t.factor, &t.factor), 2*n.exp)
}

func (t *total) addSmall(m int64, exp int) {
	if m == 0 {
		return
	}
	if t.small == 0 {
		t.small, t.exp = m, exp
		return
	}
	a, b, ok := align(number{m: t.small, exp: t.exp}, number{m: m, exp: exp})
	if sum := a + b; ok && (sum > a) == (b > 0) {
		t.small, t.exp = sum, min(t.exp, exp)
		return
	}
	t.addWide(t.term.SetInt64(t.small), t.exp)
	t.small, t.exp = m, exp
}

// addWide adds term·10^exp. It may change term.
func (t *total) addWide(term *big.Int, exp int) {
	switch {
	case term.Sign() == 0:
		return
	case t.wide.Sign() == 0:
		t.wideExp = exp
	case exp < t.wideExp:
		t.wide.Mul(&t.wide, pow10(t.wideExp-exp))
		t.wideExp = exp
	case exp > t.wideExp:
		term.Mul(term, pow10(exp-t.wideExp))
	}
	t.wide.Add(&t.wide, term)
}

func (t *total) merge(o *total) {
	t.addSmall(o.small, o.exp)
	t.addWide(t.term.Set(&o.wide), o.wideExp)
}

// number returns the sum.
func (t *total) number() number {
	if t.wide.Sign() == 0 {
		return number{m: t.small, exp: t.exp}
	}
	var sum total
	sum.addWide(sum.term.Set(&t.wide), t.wideExp)
	sum.addWide(sum.term.SetInt64(t.small), t.exp)
	return number{wide: &sum.wide, exp: sum.wideExp}
}

func (t *total) MarshalJSON() ([]byte, error) { return t.number().append(nil), nil }

func (t *total) UnmarshalJSON(text []byte) error {
	var n number
	if err := n.UnmarshalJSON(text); err != nil {
		return err
	}
	*t = total{}
	t.add(&n)
	return nil
}
