package push

import (
	"errors"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/bulkaction/bulkaction/processor"
	"github.com/bulkaction/bulkaction/processor/credential"
)

func TestAccountsAreReadWithTheirLimits(t *testing.T) {
	f := newFolder(t)
	f.fcmKey(t, "fcm.json", "shop", "https://127.0.0.1:1/token")
	got := map[string][]credential.Account{}
	start(t, config(t, f, `
fcm:
  - {id: fcm-1, credentials_file: fcm.json}
  - {id: fcm-2, credentials_file: fcm.json, rate: 80/10m, concurrency: 3}
apns:
  - {id: apns-1, key_file: apns.p8, key_id: KEY1, team_id: TEAM1, topic: org.example.app, rate: none, concurrency: unbounded}
`+webPushYAML), WithChoice(func(pool string, accounts []credential.Account) (credential.Source, error) {
		got[pool] = accounts
		return credential.TakeTurns(pool, accounts)
	}))
	require.Equal(t, map[string][]credential.Account{
		"push.fcm":     {{ID: "fcm-1"}, {ID: "fcm-2", Rate: &credential.Rate{Permits: 80, Window: 10 * time.Minute}, Concurrency: 3}},
		"push.apns":    {{ID: "apns-1", Rate: &credential.Rate{}, Concurrency: credential.Unbounded}},
		"push.webpush": {{ID: "web-1"}},
	}, got)
}

func TestAddressesOfTheServices(t *testing.T) {
	f := newFolder(t)
	f.fcmKey(t, "fcm.json", "shop", "https://127.0.0.1:1/token")
	p := start(t, config(t, f, `
fcm:
  - {id: fcm, credentials_file: fcm.json}
apns:
  - {id: live, key_file: apns.p8, key_id: K, team_id: T, topic: a}
  - {id: sandbox, key_file: apns.p8, key_id: K, team_id: T, topic: a, sandbox: true}
  - {id: own, key_file: apns.p8, key_id: K, team_id: T, topic: a, url: "https://127.0.0.1:8443/"}
`))
	all := *p.accounts.Load()
	require.Equal(t, "https://fcm.googleapis.com/v1/projects/shop/messages:send", all[FCM].members["fcm"].sender.(*fcmAccount).url.String())
	for id, want := range map[string]string{
		"live": "https://api.push.apple.com/3/device/", "sandbox": "https://api.sandbox.push.apple.com/3/device/", "own": "https://127.0.0.1:8443/3/device/",
	} {
		require.Equal(t, want, all[APNs].members[id].sender.(*apnsAccount).url.String())
	}
}

func TestAllMistakesAreReportedTogether(t *testing.T) {
	f := newFolder(t)
	c := config(t, f, `
fcm:
  - {id: a, credentials_file: gone.json, colour: red}
  - {id: a, credentials_file: fcm.json, rate: 0}
  - {credentials_file: bad.json, url: "http://127.0.0.1"}
apns:
  - {id: b, key_file: vapid, rate: 80, concurrency: 0}
  - {id: c, key_file: open.p8, key_id: K, team_id: T, topic: a, sandbox: perhaps}
webpush:
  - {id: d, key_file: apns.p8, subject: me, concurrency: -1}
  - {id: e, subject: "mailto:"}
sms: []
`)
	f.fcmKey(t, "fcm.json", "not a project", "http://127.0.0.1/")
	f.write(t, "bad.json", "SECRET")
	f.write(t, "open.p8", keyPEM(apnsKey))
	require.NoError(t, os.Chmod(filepath.Join(string(f), "open.p8"), 0o644))
	require.NoError(t, os.Chmod(c.AccountsFile, 0o640)) // the group may read it
	_, err := New(c)
	for _, want := range []string{
		"accounts.yaml:\n",
		"line 3: unknown field colour\n",
		"line 12: unknown field sms\n",
		"line 8: cannot unmarshal !!str into bool\n",
		"fcm account a: credentials_file: open ",
		"fcm account a: the id is used twice",
		`fcm account a: rate: "0" is neither`,
		"fcm account a: credentials_file: project_id is",
		"fcm account a: credentials_file: token_uri is not an absolute https URL",
		"fcm account 3: id is not",
		"fcm account 3: url is not an absolute https URL",
		"fcm account 3: credentials_file: is not JSON",
		"apns account b: key_id is missing",
		"apns account b: team_id is missing",
		"apns account b: topic is missing",
		"apns account b: key_file: is not a key",
		`apns account b: rate: "80" is neither`,
		`apns account b: concurrency: "0" is neither`,
		"open.p8: others may read it (mode 0644)",
		"webpush account d: subject is neither",
		`webpush account d: concurrency: "-1" is neither`,
		"webpush account e: key_file is missing",
		"webpush account e: subject is neither",
	} {
		require.ErrorContains(t, err, want)
	}
	require.NotContains(t, err.Error(), "SECRET")
	require.NotContains(t, err.Error(), "push.")
}

func TestFilesThatAreNoAccounts(t *testing.T) {
	for name, tt := range map[string]struct{ content, want string }{
		"empty":           {"", "lists no account"},
		"comment":         {"# nothing\n", "lists no account"},
		"empty lists":     {"fcm: []\napns:\n", "lists no account"},
		"not YAML":        {"fcm: [", "yaml: "},
		"list":            {"- fcm\n", "cannot unmarshal !!seq into accounts"},
		"field twice":     {webPushYAML + "webpush: []\n", "already defined"},
		"second document": {webPushYAML + "---\nfcm: []\n", "second document"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := New(config(t, newFolder(t), tt.content))
			require.ErrorContains(t, err, tt.want)
		})
	}
	c := config(t, newFolder(t), webPushYAML)
	require.NoError(t, os.Chmod(c.AccountsFile, 0o604))
	_, err := New(c)
	require.ErrorContains(t, err, "others may read it (mode 0604); run chmod o-r on it")
	require.NoError(t, os.Remove(c.AccountsFile))
	_, err = New(c)
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestConfig(t *testing.T) {
	c := config(t, newFolder(t), webPushYAML)
	require.NoError(t, c.Validate())
	c.Timeout, c.TLSCAFile, c.AllowedCIDRs = 0, c.AccountsFile, []netip.Prefix{{}}
	_, err := New(c)
	require.ErrorContains(t, err, "TIMEOUT: ")
	require.ErrorContains(t, err, "TLS_CA_FILE: ")
	require.ErrorContains(t, err, "ALLOWED_CIDRS: ")
}

func TestAccountsOfAPlatformAreUsedInTurn(t *testing.T) {
	s, google := serve(t, status(http.StatusOK, "{}")), serve(t, newToken)
	f := newFolder(t)
	f.fcmKey(t, "a.json", "shop-a", google.URL)
	f.fcmKey(t, "b.json", "shop-b", google.URL)
	p := start(t, config(t, f, "fcm:\n  - {id: a, credentials_file: a.json, url: \""+s.URL+"\"}\n  - {id: b, credentials_file: b.json, url: \""+s.URL+"\"}\n"))
	var paths []string
	for i := range int64(4) {
		_, err := processor.Run(t.Context(), p, job(i, toFCM))
		require.NoError(t, err)
		paths = append(paths, s.last(t).URL.Path)
	}
	a, b := "/v1/projects/shop-a/messages:send", "/v1/projects/shop-b/messages:send"
	require.Equal(t, []string{a, b, a, b}, paths)
}

func TestAChangeOfTheAccounts(t *testing.T) {
	s := serve(t, status(http.StatusOK, ""))
	f := newFolder(t)
	p := start(t, config(t, f, apnsYAML(s.URL)))
	send := func(payload string) string {
		_, err := processor.Run(t.Context(), p, job(1, payload))
		return processor.Classify(err).Code
	}
	require.Empty(t, send(toApple))
	before := account(p, APNs)

	changed, err := p.Reload()
	require.NoError(t, err)
	require.False(t, changed)

	f.write(t, "accounts.yaml", apnsYAML(s.URL)+webPushYAML)
	changed, err = p.Reload()
	require.NoError(t, err)
	require.True(t, changed)
	require.Empty(t, send(toWeb(s.URL)))
	require.Same(t, before, account(p, APNs), "an account that has not changed keeps its token and connection")

	f.write(t, "accounts.yaml", "fcm: [")
	changed, err = p.Reload()
	require.Error(t, err)
	require.False(t, changed)
	require.Empty(t, send(toApple), "the old accounts stay")
	changed, err = p.Reload()
	require.NoError(t, err, "a mistake is returned once")
	require.False(t, changed)

	f.write(t, "accounts.yaml", apnsYAML(s.URL))
	f.write(t, "apns.p8", keyPEM(otherKey))
	changed, err = p.Reload()
	require.NoError(t, err)
	require.True(t, changed)
	require.NotSame(t, before, account(p, APNs), "another secret is another account")
	require.Equal(t, CodeNotConfigured, send(toWeb(s.URL)), "an account that was removed is not used any more")
	require.Empty(t, send(toApple))

	require.NoError(t, os.Remove(filepath.Join(string(f), "apns.p8")))
	_, err = p.Reload()
	require.ErrorContains(t, err, "apns account apns-1: key_file: open ")
	require.Empty(t, send(toApple))
}

func TestASourceThatCannotBeMadeKeepsTheOldAccounts(t *testing.T) {
	f := newFolder(t)
	var fault error
	p := start(t, config(t, f, webPushYAML), WithChoice(func(pool string, accounts []credential.Account) (credential.Source, error) {
		if fault != nil {
			return nil, fault
		}
		return credential.TakeTurns(pool, accounts)
	}))
	before := account(p, WebPush)
	fault = errors.New("redis is away")
	f.write(t, "accounts.yaml", webPushYAML+"# changed\n")
	_, err := p.Reload()
	require.ErrorIs(t, err, fault)
	require.Same(t, before, account(p, WebPush))

	fault = nil
	changed, err := p.Reload()
	require.NoError(t, err)
	require.True(t, changed, "it is tried again")
}
