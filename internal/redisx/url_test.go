package redisx

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseURL(t *testing.T) {
	for raw, want := range map[string]Options{
		"redis://127.0.0.1:6379/0":              {Addrs: []string{"127.0.0.1:6379"}},
		"redis://cache":                         {Addrs: []string{"cache:6379"}},
		"redis://[::1]:7000/3":                  {Addrs: []string{"[::1]:7000"}, DB: 3},
		"redis://[::1]":                         {Addrs: []string{"[::1]:6379"}},
		"redis://:pw@h:1":                       {Addrs: []string{"h:1"}, password: "pw"},
		"redis://u:p%2Fw%40%2C%25@h:1/2":        {Addrs: []string{"h:1"}, DB: 2, Username: "u", password: "p/w@,%"},
		"redis://u:p@w@h:1":                     {Addrs: []string{"h:1"}, Username: "u", password: "p@w"},
		"rediss://u:p@h:1/0":                    {Addrs: []string{"h:1"}, TLS: true, Username: "u", password: "p"},
		"redis://h:1?cluster=true":              {Addrs: []string{"h:1"}, Cluster: true},
		"redis://h:1/0?cluster=false":           {Addrs: []string{"h:1"}},
		"redis://h1:1,h2:2,h3:3":                {Addrs: []string{"h1:1", "h2:2", "h3:3"}, Cluster: true},
		"redis://u:p@h1:1,h2:2/0":               {Addrs: []string{"h1:1", "h2:2"}, Cluster: true, Username: "u", password: "p"},
		"redis://h1:1,redis://h2:2":             {Addrs: []string{"h1:1", "h2:2"}, Cluster: true},
		"redis://u:p@h1:1/0,redis://u:p@h2:2/0": {Addrs: []string{"h1:1", "h2:2"}, Cluster: true, Username: "u", password: "p"},
		"redis-sentinel://h1:1,h2/main":         {Addrs: []string{"h1:1", "h2:26379"}, Master: "main"},
		"rediss://u:p@h1:1,h2:2":                {Addrs: []string{"h1:1", "h2:2"}, Cluster: true, TLS: true, Username: "u", password: "p"},
		"rediss-sentinel://h1:1,h2/main":        {Addrs: []string{"h1:1", "h2:26379"}, Master: "main", TLS: true},
		"redis-sentinel://u:p@h1:1/main/4?sentinel_username=su&sentinel_password=sp": {
			Addrs: []string{"h1:1"}, Master: "main", DB: 4, Username: "u", password: "p", sentinelUsername: "su", sentinelPassword: "sp",
		},
	} {
		got, err := ParseURL(raw)
		require.NoError(t, err, raw)
		require.Equal(t, want, got, raw)
	}
}

func TestParseURLRefusesAndKeepsSecrets(t *testing.T) {
	for raw, why := range map[string]string{
		"":                                     "no scheme",
		"h:6379":                               "no scheme",
		"http://h:6379":                        "unknown scheme",
		"redis://":                             "address 1: no host",
		"redis://h1:1,,h2:2":                   "address 2: no host",
		"redis://h:0":                          "port",
		"redis://h:sesame":                     "port",
		"redis://h:70000":                      "port",
		"redis://::1":                          "not host:port",
		"redis://u:sesame/x@h:1":               "port",
		"redis://u:sesame%zz@h:1":              "malformed % escape",
		"redis://u:ses,ame@h:1":                "address 1",
		"redis://h:1/sesame":                   "database",
		"redis://h:1/-1":                       "database",
		"redis://h1:1,h2:2/1":                  "only database 0",
		"redis://h:1/1?cluster=true":           "only database 0",
		"redis://h:1?cluster=sesame":           "neither true nor false",
		"redis://h:1?sesame=1":                 "unknown parameter",
		"redis://h:1?sentinel_password=sesame": "unknown parameter",
		"redis://h:1?%zz":                      "malformed parameters",
		"redis://u:p@h1:1,u:sesame@h2:2":       "different users or passwords",
		"redis-sentinel://h:1":                 "no name of a master",
		"rediss://h:1?skip_verify=true":        "skip_verify is refused: name the authority",
		"redis-sentinel://h:1/?cluster=true":   "unknown parameter",
	} {
		_, err := ParseURL(raw)
		require.ErrorContains(t, err, "parse redis url: ", raw)
		require.ErrorContains(t, err, why, raw)
		require.NotContains(t, err.Error(), "sesame", raw)
	}
}

func TestOptionsPrintNoSecrets(t *testing.T) {
	o, err := ParseURL("redis-sentinel://user:sesame@h:1/main?sentinel_password=sesame")
	require.NoError(t, err)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s"} {
		require.Equal(t, "sentinel master main at h:1 db 0", fmt.Sprintf(verb, o))
	}
}
