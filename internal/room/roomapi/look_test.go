package roomapi

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// folder writes files and returns their folder.
func folder(t *testing.T, files map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	return dir
}

// show returns the waiting page of a Look, in the language of an Accept-Language, and its policy.
func show(t *testing.T, s LookSettings, accept string) (a *API, page, policy string) {
	t.Helper()
	look, err := ReadLook(s)
	require.NoError(t, err)
	o := options(newFakeRoom())
	o.Look = look
	a = New(o)
	rec := call(t, a, "GET", pagePath, "Accept-Language: "+accept)
	require.Equal(t, http.StatusOK, rec.Code)
	return a, rec.Body.String(), rec.Header().Get("Content-Security-Policy")
}

// TestTextsOfOnesOwn: a file adds a language, or replaces texts of a built-in one. What it lacks is
// English in a new language, by en.json if that has it, and unchanged in a built-in one. Texts are
// escaped, and there is a link to each other language.
func TestTextsOfOnesOwn(t *testing.T) {
	t.Parallel()
	s := LookSettings{Texts: folder(t, map[string]string{
		"fr.json":    "\uFEFF" + `{"language": "Français", "waiting.headline": "<b>Vous attendez</b> & \"plus\""}`,
		"pt-BR.json": `{"language": "Português", "title": "Sala de espera"}`,
		"ar.json":    `{"language": "العربية", "direction": "rtl", "minutes": "حوالي %d دقيقة"}`,
		"en.json":    `{"title": "Queue of the shop"}`,
		"ko.json":    `{"leave": "그만두기"}`,
		"README.md":  "not a file of texts",
	})}
	for accept, want := range map[string][]string{
		"fr-CA,en;q=0.5": {
			`<html lang="fr">`, "&lt;b&gt;Vous attendez&lt;/b&gt; &amp; &#34;plus&#34;", "Queue of the shop",
			"You get in automatically", `lang=pt-BR" lang="pt-BR" hreflang="pt-BR">Português</a>`, ">English</a>", ">한국어</a>",
		},
		"PT":    {`<html lang="pt-BR">`, "Sala de espera", "You are in the queue"},
		"pt-PT": {`<html lang="pt-BR">`},
		"ar":    {`<html lang="ar" dir="rtl">`, "حوالي 2 دقيقة"},
		"ko":    {`<html lang="ko">`, "그만두기", "대기 중입니다", "대기실"},
		"de":    {`<html lang="en">`, "Queue of the shop"},
	} {
		_, page, _ := show(t, s, accept)
		for _, text := range want {
			require.Contains(t, page, text, accept)
		}
		require.NotContains(t, page, "<b>Vous")
		require.Equal(t, 4, strings.Count(page, "hreflang="), accept)
	}
}

func TestLogoAndColor(t *testing.T) {
	t.Parallel()
	svg := `<svg xmlns="http://www.w3.org/2000/svg"/>`
	a, page, policy := show(t, LookSettings{Logo: filepath.Join(folder(t, map[string]string{"our.svg": svg}), "our.svg"), Color: "#FFd200"}, "en")
	require.Contains(t, policy, "img-src 'self';")
	require.NotContains(t, page, "style=")
	require.Regexp(t, `<img class="logo" src="/assets/logo-[0-9a-f]{16}\.svg" alt="Logo">`, page)
	path := page[strings.Index(page, "/assets/logo-"):]
	rec := call(t, a, "GET", path[:strings.IndexByte(path, '"')])
	require.Equal(t, "image/svg+xml", rec.Header().Get("Content-Type"))
	require.Contains(t, rec.Header().Get("Content-Security-Policy"), "sandbox; default-src 'none'")
	require.Equal(t, svg, rec.Body.String())
	for color, on := range map[string]string{"#FFd200": "#000", "#1c54c4": "#fff", "#000000": "#fff", "#ffffff": "#000", "#767676": "#000"} {
		look, err := ReadLook(LookSettings{Color: color})
		require.NoError(t, err)
		require.Contains(t, look.css, "--brand: "+strings.ToLower(color)+"; --on-brand: "+on+";")
	}

	_, page, policy = show(t, LookSettings{Logo: "https://cdn.shop.example:8443/logo.png?v=1"}, "en")
	require.Contains(t, page, `src="https://cdn.shop.example:8443/logo.png?v=1"`)
	require.Contains(t, policy, "img-src 'self' https://cdn.shop.example:8443; connect-src 'self'")
	_, page, _ = show(t, LookSettings{}, "en")
	require.NotContains(t, page, "<img")
}

// TestMistakesInALook: ReadLook names the variable, the file and the text, and lists all mistakes.
func TestMistakesInALook(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		file, text string
		want       []string
	}{
		"unknown text":       {"fr.json", `{"language": "Français", "titel": "x", "headline": "y"}`, []string{"fr.json: headline: there is no such text; the texts are admitted.detail, ", "titel: there is no such text"}},
		"no name":            {"fr.json", `{"title": "x"}`, []string{"fr.json: language: is missing: the language's own name, such as Français"}},
		"empty":              {"en.json", `{"title": " "}`, []string{"en.json: title: must have 1 to 500 characters; leave it out"}},
		"long":               {"en.json", `{"title": "` + strings.Repeat("é", 501) + `"}`, []string{"title: must have 1 to 500 characters"}},
		"line break":         {"en.json", `{"title": "a\nb"}`, []string{"title: must have no line breaks"}},
		"a number":           {"en.json", `{"title": 7}`, []string{"title: must be a text"}},
		"null":               {"en.json", `{"title": null}`, []string{"title: must be a text"}},
		"nested":             {"en.json", `{"waiting": {"headline": "x"}}`, []string{"waiting: must be a text"}},
		"no number":          {"en.json", `{"minutes": "some min"}`, []string{"minutes: must have %d once"}},
		"direction":          {"ar.json", `{"language": "x", "direction": "left"}`, []string{"ar.json: direction: must be ltr or rtl"}},
		"twice":              {"en.json", `{"title": "a", "title": "b"}`, []string{"en.json: ", "title"}},
		"no object":          {"en.json", `[]`, []string{"en.json: must be a JSON object of texts"}},
		"no JSON":            {"en.json", `{"title": "a",}`, []string{"en.json: must be a JSON object of texts: invalid character"}},
		"two objects":        {"en.json", `{} {}`, []string{"en.json: must be a JSON object of texts"}},
		"no UTF-8":           {"en.json", "{\"title\": \"\xff\"}", []string{"en.json: must be UTF-8"}},
		"a name":             {"french.json", `{}`, []string{"french.json: the name must be a language and .json, such as fr.json or pt-BR.json"}},
		"a name that breaks": {"fr_FR.json", `{}`, []string{"fr_FR.json: the name must be"}},
		"a large file":       {"en.json", `{"title": "a"}` + strings.Repeat(" ", 1<<16), []string{"en.json: has 65550 bytes: must have at most 65536"}},
		"nothing":            {"notes.txt", ``, []string{"there is no file of texts in it, such as fr.json"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := folder(t, map[string]string{c.file: c.text})
			_, err := ReadLook(LookSettings{Texts: dir})
			require.ErrorContains(t, err, "BULKACTION_BROKER_PAGE_TEXTS_DIR=")
			for _, want := range c.want {
				require.ErrorContains(t, err, want)
			}
		})
	}
	_, err := ReadLook(LookSettings{Texts: filepath.Join(t.TempDir(), "absent"), Logo: "logo.bmp"})
	require.ErrorContains(t, err, "BULKACTION_BROKER_PAGE_TEXTS_DIR=")
	require.ErrorContains(t, err, "no such file or directory")
	require.ErrorContains(t, err, `BULKACTION_BROKER_PAGE_LOGO="logo.bmp": the file must end in .svg, .png`)

	dir := folder(t, map[string]string{"a.png": "<svg>", "b.svg": "GIF89a", "c.gif": "GIF89a" + strings.Repeat("x", 1<<20)})
	for logo, want := range map[string]string{
		dir + "/a.png":                            "the file is not what its name says: it looks like text/plain",
		dir + "/b.svg":                            "it looks like image/gif",
		dir + "/c.gif":                            "has 1048582 bytes: must have at most 1048576",
		dir + "/d.gif":                            "no such file",
		"http://shop.example/a.png":               "must be a file, or an address such as https://",
		"https://u:p@shop.example/a.png":          "without a user name",
		"https://shop.example;script-src */a.png": "must be a file, or an address",
		"https://*/a.png":                         "must be a file, or an address",
	} {
		_, err := ReadLook(LookSettings{Logo: logo})
		require.ErrorContains(t, err, want, logo)
	}
}
