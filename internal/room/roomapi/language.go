package roomapi

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"net/http"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/bulkaction/bulkaction/internal/messages"
)

// texts are the words of the page in one language, by key. page/texts/en.json has all keys: labels,
// and a headline and a detail for each situation, such as the reasons of the frame ended and of
// final refusals.
type texts map[string]string

// message is what the page says in one situation.
type message struct{ Headline, Detail string }

func (t texts) message(key string) message { return message{t[key+".headline"], t[key+".detail"]} }

// Messages returns the messages of all situations.
func (t texts) Messages() map[string]message {
	all := map[string]message{}
	for key := range t {
		if situation, ok := strings.CutSuffix(key, ".headline"); ok {
			all[situation] = t.message(situation)
		}
	}
	return all
}

// eta returns an estimate in words.
func (t texts) eta(seconds float64) string {
	if seconds < 60 {
		return t["soon"]
	}
	return strings.Replace(t["minutes"], "%d", grouped(int64(math.Ceil(seconds/60))), 1)
}

// languages are the texts of the page, by language tag. Each has all keys of English.
type languages map[string]texts

const (
	english      = "en"
	maxText      = 500 // characters
	maxTextsFile = 64 << 10
)

// languageFile is the name of a file of texts: language, script and region, as browsers know them.
var languageFile = regexp.MustCompile(`^([a-z]{2,3}(-[A-Z][a-z]{3})?(-([A-Z]{2}|[0-9]{3}))?)\.json$`)

// add reads the files of texts in a folder. A text that a file lacks stays as it is; of a new
// language it is the English one. The error lists all mistakes, each with its file and key.
func (l languages) add(folder fs.FS) error {
	files, err := fs.ReadDir(folder, ".")
	if err != nil {
		return err
	}
	others := func(f fs.DirEntry) bool { return f.Name() != english+".json" }
	slices.SortStableFunc(files, func(a, b fs.DirEntry) int { // English first: the others fall back on it
		return cmp.Compare(strconv.FormatBool(others(a)), strconv.FormatBool(others(b)))
	})
	var bad []error
	read := 0
	for _, f := range files {
		if !strings.EqualFold(path.Ext(f.Name()), ".json") {
			continue
		}
		read++
		if err := l.read(folder, f.Name()); err != nil {
			bad = append(bad, fmt.Errorf("%s: %w", f.Name(), err))
		}
	}
	if read == 0 {
		return errors.New("there is no file of texts in it, such as fr.json")
	}
	return errors.Join(bad...)
}

func (l languages) read(folder fs.FS, name string) error {
	match := languageFile.FindStringSubmatch(name)
	if match == nil {
		return errors.New("the name must be a language and .json, such as fr.json or pt-BR.json")
	}
	body, err := fs.ReadFile(folder, name)
	if err == nil && len(body) > maxTextsFile {
		err = fmt.Errorf("has %d bytes: must have at most %d", len(body), maxTextsFile)
	}
	if err != nil {
		return err
	}
	body = bytes.TrimPrefix(body, []byte("\uFEFF"))
	if !utf8.Valid(body) {
		return errors.New("must be UTF-8")
	}
	var given map[string]json.RawMessage
	if err := json.Unmarshal(body, &given); err != nil {
		return fmt.Errorf("must be a JSON object of texts: %w", err)
	}
	if err := messages.RepeatedKey(body); err != nil {
		return err
	}
	known, isKnown := l[match[1]]
	if !isKnown {
		if _, ok := given["language"]; !ok {
			return errors.New("language: is missing: the language's own name, such as Français")
		}
		known = l[english]
	}
	all := texts{}
	maps.Copy(all, known)
	var bad []error
	for _, key := range slices.Sorted(maps.Keys(given)) {
		text, problem := "", "must be a text"
		if given[key][0] == '"' && json.Unmarshal(given[key], &text) == nil {
			problem = textProblem(l[english], key, text)
		}
		if problem != "" {
			bad = append(bad, fmt.Errorf("%s: %s", key, problem))
		}
		all[key] = text
	}
	l[match[1]] = all
	return errors.Join(bad...)
}

// textProblem returns what is wrong with a text, or "".
func textProblem(known texts, key, text string) string {
	_, ok := known[key]
	switch {
	case len(known) > 0 && !ok:
		return "there is no such text; the texts are " + strings.Join(slices.Sorted(maps.Keys(known)), ", ")
	case strings.TrimSpace(text) == "" || utf8.RuneCountInString(text) > maxText:
		return fmt.Sprintf("must have 1 to %d characters; leave it out for the English text", maxText)
	case strings.ContainsFunc(text, unicode.IsControl):
		return "must have no line breaks and no other control characters"
	case key == "direction" && text != "ltr" && text != "rtl":
		return "must be ltr or rtl"
	case key == "minutes" && strings.Count(text, "%d") != 1:
		return "must have %d once, for the number of minutes"
	}
	return ""
}

// of returns the language of the answer to a request: that of ?lang=, else the one with the highest
// weight in Accept-Language, else English.
func (l languages) of(r *http.Request) string {
	if lang := r.URL.Query().Get("lang"); l[lang] != nil {
		return lang
	}
	best, weight := english, 0.0
	for part := range strings.SplitSeq(strings.Join(r.Header.Values("Accept-Language"), ","), ",") {
		tag, params, _ := strings.Cut(part, ";")
		q := 1.0
		if value, ok := strings.CutPrefix(strings.TrimSpace(params), "q="); ok {
			var err error
			if q, err = strconv.ParseFloat(value, 64); err != nil {
				continue
			}
		}
		if lang := l.match(strings.TrimSpace(tag)); lang != "" && q > weight {
			best, weight = lang, q
		}
	}
	return best
}

// match returns the language for a tag: the same one, else one that differs in script or region;
// "" if there is none.
func (l languages) match(tag string) (best string) {
	primary := func(tag string) string { p, _, _ := strings.Cut(tag, "-"); return p }
	for _, lang := range slices.Sorted(maps.Keys(l)) {
		if strings.EqualFold(lang, tag) {
			return lang
		}
		if best == "" && strings.EqualFold(primary(lang), primary(tag)) {
			best = lang
		}
	}
	return best
}

// grouped formats a number with a comma between groups of three digits. JavaScript formats it as
// the language does.
func grouped(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
