package roomapi

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// Look is how the waiting page looks: its languages, logo and colour.
type Look struct {
	languages  languages
	css        string // after that of the page
	logo       asset  // a file; without body: none
	logoExt    string
	logoURL    string // of another host
	logoOrigin string // of logoURL, with a space before it
}

// LookSettings are the settings of a Look. "" is the standard.
type LookSettings struct {
	Texts string // folder with LANGUAGE.json
	Logo  string // file, or address with https://
	Color string // #rrggbb, checked by the caller
}

// standardLook has the embedded texts. Each test would find a mistake in these.
func standardLook() *Look {
	l := &Look{languages: languages{}}
	folder, err := fs.Sub(pageFiles, "page/texts")
	if err == nil {
		err = l.languages.add(folder)
	}
	if err != nil {
		panic(err)
	}
	return l
}

// ReadLook reads the files of a Look. The error names the variables, files and texts that are wrong.
func ReadLook(s LookSettings) (*Look, error) {
	l := standardLook()
	var bad []error
	if s.Texts != "" {
		if err := l.languages.add(os.DirFS(s.Texts)); err != nil {
			bad = append(bad, fmt.Errorf("BULKACTION_BROKER_PAGE_TEXTS_DIR=%q: %w", s.Texts, err))
		}
	}
	if s.Logo != "" {
		if err := l.setLogo(s.Logo); err != nil {
			bad = append(bad, fmt.Errorf("BULKACTION_BROKER_PAGE_LOGO=%q: %w", s.Logo, err))
		}
	}
	if s.Color != "" {
		l.setColor(s.Color)
	}
	return l, errors.Join(bad...)
}

const maxLogo = 1 << 20 // bytes

var (
	logoTypes = map[string]string{
		".svg": "image/svg+xml", ".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp",
		".gif": "image/gif",
	}
	// hostPort is what may stand in the Content-Security-Policy.
	hostPort = regexp.MustCompile(`^[A-Za-z0-9.-]+(:[0-9]+)?$`)
)

func (l *Look) setLogo(logo string) error {
	if strings.Contains(logo, "://") {
		u, err := url.Parse(logo)
		if err != nil || u.Scheme != "https" || u.User != nil || !hostPort.MatchString(u.Host) {
			return errors.New("must be a file, or an address such as https://shop.example/logo.svg without a user name")
		}
		l.logoURL, l.logoOrigin = u.String(), " https://"+u.Host
		return nil
	}
	l.logoExt = strings.ToLower(filepath.Ext(logo))
	contentType, ok := logoTypes[l.logoExt]
	if !ok {
		return errors.New("the file must end in .svg, .png, .jpg, .jpeg, .webp or .gif")
	}
	body, err := os.ReadFile(logo)
	if err == nil && len(body) > maxLogo {
		err = fmt.Errorf("the file has %d bytes: must have at most %d", len(body), maxLogo)
	}
	if err != nil {
		return err
	}
	is := http.DetectContentType(body)
	if l.logoExt == ".svg" && bytes.Contains(body, []byte("<svg")) {
		is = contentType
	}
	if is != contentType {
		return fmt.Errorf("the file is not what its name says: it looks like %s", is)
	}
	l.logo = asset{contentType, body}
	return nil
}

// setColor sets the colour of buttons and of the line above the page. Text on it is black or white,
// whichever is easier to read; no text has the colour itself, so any colour will do.
func (l *Look) setColor(color string) {
	var rgb [3]byte
	_, _ = fmt.Sscanf(color, "#%2x%2x%2x", &rgb[0], &rgb[1], &rgb[2])
	linear := func(c byte) float64 { return math.Pow(float64(c)/255, 2.2) }
	light := 0.2126*linear(rgb[0]) + 0.7152*linear(rgb[1]) + 0.0722*linear(rgb[2]) // about the relative luminance of WCAG
	on := "#fff"
	if (light+0.05)/0.05 > 1.05/(light+0.05) {
		on = "#000"
	}
	l.css = fmt.Sprintf(":root { --brand: #%02x%02x%02x; --on-brand: %s; }\n", rgb[0], rgb[1], rgb[2], on) +
		"main { border-top: .375rem solid var(--brand); }\n"
}
