package roomadmin

import (
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/api"
	"github.com/bulkaction/bulkaction/internal/room/waitingroom"
)

func rules() Rules {
	return Rules{Defaults: Standard(), ReturnHosts: []string{"shop.example", "pay.example:8443", "[2001:db8::1]"}}
}

func d(d time.Duration) *api.Duration { return new(api.Duration(d)) }

func fieldsOf(bad []api.FieldError) (names []string) {
	for _, b := range bad {
		names = append(names, b.Field)
	}
	return names
}

func TestCheckNamesTheFieldAndItsLimit(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		set            func(*api.EventSettings)
		field, problem string // "": the settings are fine
	}{
		"largest": {func(s *api.EventSettings) { s.Capacity, s.Stock = new(int64(10_000_000)), new(int64(10_000_000)) }, "", ""},
		"smallest": {func(s *api.EventSettings) {
			s.Capacity, s.Stock, s.MaxWaiting = new(int64(0)), new(int64(0)), new(int64(0))
		}, "", ""},
		"no capacity":         {func(s *api.EventSettings) { s.Capacity = nil }, "capacity", "required"},
		"negative capacity":   {func(s *api.EventSettings) { s.Capacity = new(int64(-1)) }, "capacity", "from 0 to 10,000,000"},
		"huge capacity":       {func(s *api.EventSettings) { s.Capacity = new(int64(math.MaxInt64)) }, "capacity", "from 0 to 10,000,000"},
		"negative stock":      {func(s *api.EventSettings) { s.Stock = new(int64(-1)) }, "stock", "from 0 to 10,000,000"},
		"long queue":          {func(s *api.EventSettings) { s.MaxWaiting = new(int64(100_000_001)) }, "max_waiting", "100,000,000"},
		"rate":                {func(s *api.EventSettings) { s.Rate, s.Burst = new(0.001), 1_000_000 }, "", ""},
		"rate 0":              {func(s *api.EventSettings) { s.Rate = new(0.0) }, "rate", "from 0.001 to 1,000,000"},
		"rate NaN":            {func(s *api.EventSettings) { s.Rate = new(math.NaN()) }, "rate", "from 0.001 to 1,000,000"},
		"rate infinite":       {func(s *api.EventSettings) { s.Rate = new(math.Inf(1)) }, "rate", "from 0.001 to 1,000,000"},
		"burst alone":         {func(s *api.EventSettings) { s.Burst = 1 }, "burst", "needs rate"},
		"negative burst":      {func(s *api.EventSettings) { s.Rate, s.Burst = new(1.0), -1 }, "burst", "to 1,000,000"},
		"huge burst":          {func(s *api.EventSettings) { s.Rate, s.Burst = new(1.0), 1_000_001 }, "burst", "to 1,000,000"},
		"no life":             {func(s *api.EventSettings) { s.TokenTTL = d(0) }, "token_ttl", "1s to 24h"},
		"long life":           {func(s *api.EventSettings) { s.TokenTTL = d(24*time.Hour + 1) }, "token_ttl", "1s to 24h"},
		"negative leeway":     {func(s *api.EventSettings) { s.Leeway = d(-1) }, "leeway", "0s to 5m"},
		"no limit of session": {func(s *api.EventSettings) { s.MaxSession = d(0) }, "", ""},
		"long session":        {func(s *api.EventSettings) { s.MaxSession = d(721 * time.Hour) }, "max_session", "720h"},
		"no time":             {func(s *api.EventSettings) { s.Ready = d(0) }, "ready", "100ms to 24h"},
		"no grace":            {func(s *api.EventSettings) { s.Grace = d(0) }, "", ""},
		"long grace":          {func(s *api.EventSettings) { s.Grace = d(math.MaxInt64) }, "grace", "24h"},
		"parts of a ms":       {func(s *api.EventSettings) { s.Grace = d(time.Second + 1) }, "grace", "whole milliseconds"},
		"long retention":      {func(s *api.EventSettings) { s.Retention = d(8761 * time.Hour) }, "retention", "8760h"},
		"on_close":            {func(s *api.EventSettings) { s.OnClose = "wait" }, "on_close", "must be keep or release"},
		"no_show":             {func(s *api.EventSettings) { s.NoShow = "keep" }, "no_show", "must be wait or release"},
		"mode":                {func(s *api.EventSettings) { s.Mode = "drain" }, "mode", "must be open, paused, closed or sold_out"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			set := api.EventSettings{Capacity: new(int64(5))}
			c.set(&set)
			bad := rules().Check(set)
			if c.field == "" {
				require.Empty(t, bad)
				return
			}
			require.Equal(t, []string{c.field}, fieldsOf(bad))
			require.Contains(t, bad[0].Problem, c.problem)
		})
	}
}

func TestCheckNamesEveryBadField(t *testing.T) {
	t.Parallel()
	set := api.EventSettings{
		Stock: new(int64(-1)), Rate: new(-1.0), Burst: -1, MaxWaiting: new(int64(-1)), TokenTTL: d(-1), Leeway: d(-1), MaxSession: d(-1),
		Ready: d(-1), Grace: d(-1), OnClose: "x", NoShow: "x", Mode: "x", ReturnURL: "x", Retention: d(-1),
	}
	require.Equal(t, []string{
		"capacity", "stock", "rate", "burst", "max_waiting", "token_ttl", "leeway", "max_session", "ready", "grace", "retention",
		"on_close", "no_show", "mode", "return_url",
	}, fieldsOf(rules().Check(set)))
	r := rules()
	r.Seats = true
	require.NotContains(t, fieldsOf(r.Check(set)), "capacity")
}

func TestReturnURLs(t *testing.T) {
	t.Parallel()
	for address, problem := range map[string]string{
		"https://shop.example/buy?x=1#top":                  "",
		"https://SHOP.example:9999":                         "",
		"https://pay.example:8443/":                         "",
		"https://[2001:db8::1]:4/":                          "",
		"http://127.0.0.1:8081/buy":                         "",
		"http://localhost:8081":                             "",
		"https://[::1]/":                                    "",
		"https://pay.example/":                              "not in BULKACTION_BROKER_RETURN_HOSTS",
		"https://evil.example/":                             "its host evil.example is not in BULKACTION_BROKER_RETURN_HOSTS: add it there",
		"https://shop.example.evil.example":                 "not in BULKACTION_BROKER_RETURN_HOSTS",
		"https://127.0.0.1.evil.example/":                   "not in BULKACTION_BROKER_RETURN_HOSTS",
		"http://shop.example/":                              "must begin with https://",
		"javascript:alert(1)":                               "must be an address",
		"javascript://shop.example/%0aalert(1)":             "must begin with https://",
		"data:text/html,x":                                  "must be an address",
		"ftp://127.0.0.1/":                                  "must begin with https://",
		"//shop.example/buy":                                "must begin with https://",
		"/buy":                                              "must be an address",
		"shop.example":                                      "must be an address",
		"https://shop.example@evil.example/":                "must be an address",
		"https://user:pass@shop.example/":                   "must be an address",
		"https://evil.example\\@shop.example/":              "must be an address",
		"https://shop.example/a b":                          "must be an address",
		"https://shop.example/\r\nX: y":                     "must be an address",
		"https:shop.example":                                "must be an address",
		"https://":                                          "must be an address",
		"https://shop.example/" + strings.Repeat("x", 2048): "at most 2,048 bytes",
	} {
		bad := rules().Check(api.EventSettings{Capacity: new(int64(1)), ReturnURL: address})
		if problem == "" {
			require.Empty(t, bad, address)
			continue
		}
		require.Len(t, bad, 1, address)
		require.Contains(t, bad[0].Problem, problem, address)
	}
}

func TestRecalibrations(t *testing.T) {
	t.Parallel()
	r := rules()
	n, negative := new(int64(0)), new(int64(-1))
	require.Empty(t, r.CheckRecalibration(api.Recalibration{Capacity: n, Stock: n}))
	require.Equal(t, []string{"capacity"}, fieldsOf(r.CheckRecalibration(api.Recalibration{})))
	require.Equal(t, []string{"capacity", "stock"}, fieldsOf(r.CheckRecalibration(api.Recalibration{Capacity: negative, Stock: negative})))
	require.Equal(t, []string{"from_seats"}, fieldsOf(r.CheckRecalibration(api.Recalibration{FromSeats: true})))
	r.Seats = true
	require.Empty(t, r.CheckRecalibration(api.Recalibration{FromSeats: true, Stock: n}))
	require.Equal(t, []string{"from_seats"}, fieldsOf(r.CheckRecalibration(api.Recalibration{FromSeats: true, Capacity: n})))
}

func TestFillGivesDefaults(t *testing.T) {
	t.Parallel()
	s := rules().Fill(api.EventSettings{Capacity: new(int64(7))})
	require.Equal(t, waitingroom.Settings{
		Capacity: 7, MaxWaiting: 1_000_000, TokenTTL: 5 * time.Minute, Leeway: 10 * time.Second, MaxSession: 15 * time.Minute,
		Ready: 30 * time.Second, Grace: time.Minute, OnClose: "keep", NoShow: "wait", Retention: 24 * time.Hour,
	}, s)
	for preset, want := range map[string]waitingroom.Settings{
		"strict":   {Grace: 0, OnClose: "release", NoShow: "release"},
		"standard": {Grace: time.Minute, OnClose: "keep", NoShow: "wait"},
	} {
		set := api.EventSettings{Capacity: new(int64(7)), Preset: preset}
		require.Empty(t, rules().Check(set))
		s := rules().Fill(set)
		require.Equal(t, want, waitingroom.Settings{Grace: s.Grace, OnClose: s.OnClose, NoShow: s.NoShow})
		set.Grace, set.OnClose = d(time.Second), "keep" // what is given, holds
		require.Equal(t, time.Second, rules().Fill(set).Grace)
		require.Equal(t, "keep", rules().Fill(set).OnClose)
		require.Equal(t, want.NoShow, rules().Fill(set).NoShow)
	}
	require.Equal(t, []string{"preset"}, fieldsOf(rules().Check(api.EventSettings{Capacity: new(int64(7)), Preset: "Strict"})))
	require.True(t, rules().Fill(api.EventSettings{}).SeatsPending)
	for rate, burst := range map[float64]int64{0.001: 1, 0.9: 1, 1: 1, 2.9: 2, 500: 500} {
		require.Equal(t, burst, rules().Fill(api.EventSettings{Rate: &rate}).Burst)
	}
	require.EqualValues(t, 9, rules().Fill(api.EventSettings{Rate: new(1.0), Burst: 9}).Burst)
}

// TestViewCanBeSentBack shows that an operator can send the settings in a View, as JSON, back:
// filled with the defaults, they are the settings from which the View was made.
func TestViewCanBeSentBack(t *testing.T) {
	t.Parallel()
	for _, set := range []api.EventSettings{
		{Capacity: new(int64(7))},
		{}, // the seat service has not answered
		{
			Capacity: new(int64(0)), Stock: new(int64(5)), Rate: new(2.5), Burst: 3, MaxWaiting: new(int64(0)), TokenTTL: d(time.Second),
			Leeway: d(0), MaxSession: d(0), Ready: d(time.Second), Grace: d(0), OnClose: "release", NoShow: "release", Mode: "paused",
			ReturnURL: "https://shop.example/", Retention: d(0),
		},
	} {
		filled := rules().Fill(set)
		text, err := json.Marshal(View(waitingroom.Snapshot{Event: "e", Settings: filled}))
		require.NoError(t, err)
		var v api.RoomEvent
		require.NoError(t, json.Unmarshal(text, &v))
		require.Equal(t, filled, rules().Fill(v.EventSettings))
	}
}

func TestViewShowsWhatIsOverTheLimit(t *testing.T) {
	t.Parallel()
	s := waitingroom.Snapshot{Settings: waitingroom.Settings{Capacity: 10}, Used: 7}
	require.Zero(t, View(s).Over)
	s.Left = new(int64(3))
	require.EqualValues(t, 4, View(s).Over)
	s.Settings.Capacity = 1
	require.EqualValues(t, 6, View(s).Over)
	require.Equal(t, api.EventSlots{Capacity: 1, Used: 7, Stock: new(int64(3))}, View(s).Slots)
}
