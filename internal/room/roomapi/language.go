package roomapi

import (
	"math"
	"net/http"
	"strconv"
	"strings"
)

// texts are the words of the page in one language.
type texts struct {
	Title                string
	Position, Total, ETA string // labels
	Soon, Minutes        string // ETA under a minute, and of %d minutes
	Paused               string
	Leave, Again, GoOn   string // buttons
	OtherLanguage        string // in that language
	Messages             map[string]message
}

// message is what the page says in one situation.
type message struct{ Headline, Detail string }

// languages are the texts of the waiting page, by language. All languages have the same keys:
// waiting, start, admitted, no_link (admitted without return_url), later, the reasons of the frame
// ended, and the reasons of final refusals.
var languages = map[string]texts{
	"en": {
		Title: "Waiting room", Position: "Your place", Total: "People in the queue", ETA: "Estimated wait",
		Soon: "less than a minute", Minutes: "about %d min",
		Paused: "Entry is paused at the moment. You keep your place.",
		Leave:  "Leave the queue", Again: "Queue again", GoOn: "Continue", OtherLanguage: "한국어",
		Messages: map[string]message{
			"waiting": {"You are in the queue",
				"Keep this page open. You get in automatically when it is your turn."},
			"start":    {"One moment, please", "You are being added to the queue."},
			"admitted": {"It is your turn", "You can go on now."},
			"no_link":  {"It is your turn", "Go back to the shop."},
			"later":    {"The waiting room is busy", "Keep this page open. It tries again by itself."},
			"left":     {"You have left", "If you queue again, you start at the end of the queue."},
			"replaced": {"Open in another tab",
				"You are waiting in another tab or window. You can close this one."},
			"closed":        {"Closed", "Entry is closed."},
			"sold_out":      {"Sold out", "All seats are sold."},
			"removed":       {"Removed from the queue", "The operator has ended your wait."},
			"gone":          {"Your time is over", "Your place has expired. You can queue again."},
			"unknown_event": {"Not found", "There is no such waiting room. Check the address."},
		},
	},
	"ko": {
		Title: "대기실", Position: "내 순서", Total: "전체 대기 인원", ETA: "예상 대기 시간",
		Soon: "1분 미만", Minutes: "약 %d분",
		Paused: "지금은 입장이 일시 중지되었습니다. 순서는 그대로 유지됩니다.",
		Leave:  "대기열 나가기", Again: "다시 대기하기", GoOn: "계속하기", OtherLanguage: "English",
		Messages: map[string]message{
			"waiting":       {"대기 중입니다", "이 페이지를 열어 두세요. 차례가 되면 자동으로 입장합니다."},
			"start":         {"잠시만 기다려 주세요", "대기열에 등록하고 있습니다."},
			"admitted":      {"입장하실 차례입니다", "이제 계속 진행할 수 있습니다."},
			"no_link":       {"입장하실 차례입니다", "이전 사이트로 돌아가 주세요."},
			"later":         {"지금은 이용자가 많습니다", "이 페이지를 열어 두세요. 자동으로 다시 시도합니다."},
			"left":          {"대기열에서 나왔습니다", "다시 대기하면 맨 뒤에서 시작합니다."},
			"replaced":      {"다른 탭에서 열렸습니다", "다른 탭이나 창에서 대기가 계속됩니다. 이 탭은 닫아도 됩니다."},
			"closed":        {"마감되었습니다", "더 이상 입장할 수 없습니다."},
			"sold_out":      {"매진되었습니다", "모든 좌석이 판매되었습니다."},
			"removed":       {"대기열에서 제외되었습니다", "운영자가 대기를 종료했습니다."},
			"gone":          {"시간이 만료되었습니다", "순서가 만료되었습니다. 다시 대기할 수 있습니다."},
			"unknown_event": {"찾을 수 없습니다", "해당 대기실이 없습니다. 주소를 확인해 주세요."},
		},
	},
}

// eta returns an estimate in words.
func (t texts) eta(seconds float64) string {
	if seconds < 60 {
		return t.Soon
	}
	return strings.Replace(t.Minutes, "%d", grouped(int64(math.Ceil(seconds/60))), 1)
}

// languageOf returns the language of the answer to a request: that of ?lang=, else the supported
// one with the highest weight in Accept-Language, else English.
func languageOf(r *http.Request) string {
	if lang := r.URL.Query().Get("lang"); languages[lang].Title != "" {
		return lang
	}
	best, weight := "en", 0.0
	for part := range strings.SplitSeq(strings.Join(r.Header.Values("Accept-Language"), ","), ",") {
		tag, params, _ := strings.Cut(part, ";")
		lang, _, _ := strings.Cut(strings.ToLower(strings.TrimSpace(tag)), "-")
		q := 1.0
		if value, ok := strings.CutPrefix(strings.TrimSpace(params), "q="); ok {
			var err error
			if q, err = strconv.ParseFloat(value, 64); err != nil {
				continue
			}
		}
		if languages[lang].Title != "" && q > weight {
			best, weight = lang, q
		}
	}
	return best
}

// grouped formats a number with a comma between groups of three digits, which fits both languages.
func grouped(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
