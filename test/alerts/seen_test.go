package alerts

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// fault is something that fails for a while, and what somebody on call sees of it.
type fault struct {
	name       string
	begin, end func()        // end may be nil: it lasts
	meanwhile  func()        // happens once a minute, beside the calls of callers; may be nil
	lasts      time.Duration // by the clock of Prometheus; 20 minutes if it is 0

	ready        int    // /readyz
	check        string // how the line of a failing check begins; empty: none fails
	read, change bool   // whether these calls are served
	metric       string // a series that changes, or with a value a line that is there meanwhile only
	log          string // how the message of a line begins; empty: there is none
	alerts       []string
}

// sight is what somebody on call sees of a server at one time.
type sight struct {
	ready           int
	checks, metrics string
}

// look looks at a server, which may have no metrics yet.
func (s *server) look() (seen sight) {
	s.t.Helper()
	seen.ready, _ = s.see("/readyz")
	_, seen.checks = s.see("/readyz?verbose")
	_, seen.metrics = s.see("/metrics")
	return seen
}

// see asks the address of operations. An answer that was cut off counts as none.
func (s *server) see(path string) (status int, text string) {
	answer, err := http.Get(strings.TrimSuffix(s.metrics, "/metrics") + path)
	if err != nil {
		return 0, ""
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return 0, ""
	}
	return answer.StatusCode, string(body)
}

// value returns the value of a series, or nothing.
func (v sight) value(series string) string {
	_, rest, _ := strings.Cut("\n"+v.metrics, "\n"+series+" ")
	value, _, _ := strings.Cut(rest, "\n")
	return value
}

// line returns the line of the checks that begins so.
func (v sight) line(begin string) string {
	for line := range strings.Lines(v.checks) {
		if strings.HasPrefix(line, begin) {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

// differs returns how what is seen differs from what a fault must show, given what was seen before.
func (f fault) differs(before, seen sight) error {
	var all []error
	no := func(is bool, format string, args ...any) {
		if !is {
			all = append(all, fmt.Errorf(format, args...))
		}
	}
	no(seen.ready == f.ready, "/readyz is %d", seen.ready)
	no(f.check == "" && !strings.Contains(seen.checks, "[-]") || f.check != "" && seen.line(f.check) != "", "no check begins with %q", f.check)
	for class, served := range map[string]bool{"read": f.read, "change": f.change} {
		want := map[bool]string{true: "1", false: "0"}[served]
		no(seen.value(`latticekeep_serving{class="`+class+`"}`) == want, "%s calls: %s", class, seen.value(`latticekeep_serving{class="`+class+`"}`))
	}
	if strings.Contains(f.metric[max(0, strings.LastIndex(f.metric, "}")):], " ") {
		no(strings.Contains("\n"+seen.metrics, "\n"+f.metric+"\n"), "no metric %s", f.metric)
	} else {
		no(seen.value(f.metric) != "" && seen.value(f.metric) != before.value(f.metric), "%s stays %s", f.metric, seen.value(f.metric))
	}
	return errors.Join(all...)
}

// suffers has a server suffer a fault, and checks what is seen before, meanwhile and afterwards. The
// alerts are judged with the others by [prometheus.judge].
func (p *prometheus) suffers(s *server, f fault) {
	t := p.t
	t.Helper()
	if f.lasts == 0 {
		f.lasts = 20 * time.Minute
	}
	calls := func(read, change bool) {
		t.Helper()
		for what, call := range map[string]struct {
			status, well int
			served       bool
		}{"reading": {s.read(), http.StatusOK, read}, "sealing": {s.seal(), http.StatusCreated, change}} {
			if call.served != (call.status == call.well) || !call.served && call.status != http.StatusServiceUnavailable {
				t.Errorf("%s: %s: %d\n%s", f.name, what, call.status, s.log.Tail())
			}
		}
	}
	well := fault{ready: http.StatusOK, read: true, change: true, metric: `latticekeep_serving{class="read"} 1`}
	p.during(10*time.Minute, p.scraped(s, func() { calls(true, true) }))
	before := s.look()
	if err := well.differs(before, before); err != nil {
		t.Fatalf("before %s: %v\n%s", f.name, err, before.checks)
	}
	p.expect(f.name + ": before")

	logged, began := len(s.log.String()), time.Now()
	f.begin()
	var seen sight
	s.await(f.name, func() bool {
		s.read()
		s.seal()
		if f.meanwhile != nil {
			f.meanwhile()
		}
		seen = s.look()
		return f.differs(before, seen) == nil || s.dead()
	}, func() string { return fmt.Sprint(f.differs(before, seen), "\n", seen.checks) })
	p.during(f.lasts, p.scraped(s, func() {
		if f.meanwhile != nil {
			f.meanwhile()
		}
		calls(f.read, f.change)
	}))
	p.expect(f.name, f.alerts...)
	f.shows(s, before)
	f.checkLog(t, s.log.String()[logged:], time.Since(began))
	if f.end == nil {
		return
	}
	f.end()
	var after sight
	s.await("the end of "+f.name, func() bool {
		after = s.look()
		return well.differs(after, after) == nil && s.read() == http.StatusOK && s.seal() == http.StatusCreated
	}, func() string { return fmt.Sprint(well.differs(after, after), "\n", after.checks) })
	p.during(20*time.Minute, p.scraped(s, func() { calls(true, true) }))
	p.expect(f.name + ": after")
}

// shows checks what is seen now, given what was seen before, and writes it down.
func (f fault) shows(s *server, before sight) {
	s.t.Helper()
	seen := s.look()
	if err := f.differs(before, seen); err != nil {
		s.t.Errorf("%s: %v\n%s", f.name, err, seen.checks)
	}
	if f.log != "" && s.said(f.log, "msg") == "" {
		s.t.Errorf("%s: the log does not say %q", f.name, f.log)
	}
	f.write(s.t, seen)
}

// checkLog checks that the log says what the fault is, and says no error more often than once a
// second.
func (f fault) checkLog(t *testing.T, log string, during time.Duration) {
	t.Helper()
	said, repeated := f.log == "", make(map[[2]string]int)
	for line := range strings.Lines(log) {
		var l struct{ Level, Msg, Error, Err string }
		if json.Unmarshal([]byte(line), &l) != nil {
			continue
		}
		said = said || strings.HasPrefix(l.Msg, f.log)
		if cause := l.Error + l.Err; cause != "" && (l.Level == "ERROR" || l.Level == "WARN") {
			repeated[[2]string{l.Msg, cause}]++
		}
	}
	if !said {
		t.Errorf("%s: the log does not say %q:\n%s", f.name, f.log, log[max(0, len(log)-3000):])
	}
	for line, n := range repeated {
		if most := 2 + int(during/time.Second); n > most {
			t.Errorf("%s: the log says %d times in %s: %s", f.name, n, during.Round(time.Second), line)
		}
	}
}

// write writes the row of the fault in docs/chaos.md.
func (f fault) write(t *testing.T, seen sight) {
	t.Helper()
	check := "none"
	if f.check != "" {
		check, _, _ = strings.Cut(seen.line(f.check), ": ")
		check = "`" + check + "`"
	}
	metric := f.metric
	if value := seen.value(metric); value != "" {
		metric += " " + value
	}
	log := "none"
	if f.log != "" {
		log = "`" + f.log + "`"
	}
	served := map[bool]string{true: "served", false: "503"}
	alerts := slices.Clone(f.alerts)
	for i := range alerts {
		alerts[i] = strings.TrimPrefix(alerts[i], "Latticekeep")
	}
	writeRow(t, fmt.Sprintf("| %s | %d | %s | %s | %s | `%s` | %s | %s |", f.name, seen.ready, served[f.read], served[f.change], check, metric, log, strings.Join(alerts, ", ")))
}

// writeRow writes a line of docs/chaos.md, where `make chaos` collects them.
func writeRow(t *testing.T, row string) {
	t.Helper()
	path := os.Getenv("CHAOS_TRANSCRIPT")
	if path == "" {
		return
	}
	out, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	_, err = fmt.Fprintln(out, row)
	if err := errors.Join(err, out.Close()); err != nil {
		t.Fatal(err)
	}
}

// expect has the alerts of now judged later.
func (p *prometheus) expect(when string, alerts ...string) {
	p.expected = append(p.expected, expectation{when, p.now, alerts})
}

type expectation struct {
	when   string
	at     time.Time
	alerts []string
}

// judge evaluates the alerts, and returns all that had to fire.
func (p *prometheus) judge() (fired []string) {
	p.t.Helper()
	firing := p.firing("1")
	for _, e := range p.expected {
		fired = append(fired, want(p.t, e.when, firing(e.at), e.alerts...)...)
	}
	return fired
}

// await waits until something is so, however busy the machine is.
func (s *server) await(what string, is func() bool, why ...func() string) {
	s.t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			for _, why := range why {
				s.t.Log(why())
			}
			s.t.Fatalf("waited in vain for %s:\n%s", what, s.log.Tail())
		}
	}
}

// long reports whether the faults that take minutes are caused too, as `make chaos` does.
func long() bool { return os.Getenv("CHAOS_LONG") != "" }
