package alerts

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
)

const rulesFile = "../../charts/latticekeep/files/alerts.yaml"

// rule is an alert of the chart.
type rule struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for,omitempty"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

// readRules returns the alerts of the chart for a deployment of that many servers.
func readRules(t *testing.T, replicas string) (rules []rule) {
	t.Helper()
	text, err := os.ReadFile(rulesFile)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(bytes.ReplaceAll(text, []byte("REPLICAS"), []byte(replicas)), &rules); err != nil {
		t.Fatalf("reading %s: %v", rulesFile, err)
	}
	return rules
}

// prometheus collects scrapes at times of its own. Its clock begins now, because metrics with times
// have those of the servers, and moves by step.
type prometheus struct {
	t       *testing.T
	step    time.Duration
	now     time.Time
	scrapes []scrape

	// ignored are alerts that may fire. The scrapes of minutes are made within a second of a server's
	// time, so its checkpoints stand still, as they do when they fail. On a busy machine commits are slow.
	ignored []string
	volume  bool // the servers have a volume of their own; else that of the tests must not matter

	expected []expectation
}

// scrape and alert have the form of hack/prometheus.
type scrape struct {
	Time   time.Time         `json:"time"`
	Labels map[string]string `json:"labels"`
	Text   string            `json:"text"`
	Gone   bool              `json:"gone"`
}

type alert struct {
	Time        time.Time         `json:"time"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

// newPrometheus returns one that scrapes each step, or skips the test where there is none.
func newPrometheus(t *testing.T, step time.Duration) *prometheus {
	t.Helper()
	if testing.Short() {
		t.Skip("-short: needs the rules of Prometheus")
	}
	if _, err := os.Stat(program); err != nil {
		t.Fatalf("there are no rules of Prometheus: run `make prometheus` first: %v", err)
	}
	return &prometheus{t: t, step: step, now: time.Now().UTC().Truncate(time.Millisecond), ignored: []string{"LatticekeepCheckpointBehind", "LatticekeepAnchorBehind", "LatticekeepCommitsSlow"}}
}

const program = "../../bin/tools/alerts"

// get returns what is at url, and nothing when it cannot be reached.
func get(t *testing.T, url string) string {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.DefaultClient.Do(request)
	if err != nil {
		return ""
	}
	defer r.Body.Close()
	text, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusOK {
		t.Fatalf("%s: %d %s %v", url, r.StatusCode, text, err)
	}
	return string(text)
}

// scrape adds what the target instance answers; nothing if it did not.
func (p *prometheus) scrape(instance, text string) {
	if text != "" && !p.volume {
		text = set(set(text, "latticekeep_disk_bytes", 10e9), "latticekeep_disk_free_bytes", 9e9)
	}
	p.scrapes = append(p.scrapes, scrape{p.now, target(instance), text, false})
}

// forget ends a target, as when its pod is deleted.
func (p *prometheus) forget(instance string) {
	p.scrapes = append(p.scrapes, scrape{p.now, target(instance), "", true})
}

func target(instance string) map[string]string {
	return map[string]string{"job": "latticekeep-headless", "instance": instance}
}

// during calls each at every step until d has passed, and returns the last moment.
func (p *prometheus) during(d time.Duration, each func()) time.Time {
	for end := p.now.Add(d); p.now.Before(end); {
		p.now = p.now.Add(p.step)
		each()
	}
	return p.now
}

// firing evaluates the alerts of the chart for a deployment of that many servers over all scrapes. It
// returns a function that lists the alerts that fired at a time, each once and in order.
func (p *prometheus) firing(replicas string) func(at time.Time) []string {
	p.t.Helper()
	return p.evaluate(readRules(p.t, replicas))
}

// evaluate is firing for any alerts.
func (p *prometheus) evaluate(all []rule) func(at time.Time) []string {
	p.t.Helper()
	rules := filepath.Join(p.t.TempDir(), "rules.yaml")
	text, err := yaml.Marshal(map[string]any{"groups": []any{map[string]any{"name": "latticekeep", "rules": all}}})
	if err != nil {
		p.t.Fatal(err)
	}
	if err := os.WriteFile(rules, text, 0o600); err != nil {
		p.t.Fatal(err)
	}
	in, err := json.Marshal(p.scrapes)
	if err != nil {
		p.t.Fatal(err)
	}
	cmd := exec.CommandContext(p.t.Context(), program, rules)
	var failure bytes.Buffer
	cmd.Stdin, cmd.Stderr = bytes.NewReader(in), &failure
	out, err := cmd.Output()
	if err != nil {
		p.t.Fatalf("evaluating the rules: %v\n%s", err, failure.String())
	}
	var alerts []alert
	if err := json.Unmarshal(out, &alerts); err != nil {
		p.t.Fatal(err)
	}
	for _, a := range alerts {
		for name, text := range a.Annotations {
			if text == "" || strings.Contains(text, "<error") || strings.Contains(text, "<no value>") {
				p.t.Errorf("%s: its %s is %q", a.Labels["alertname"], name, text)
			}
		}
	}
	return func(at time.Time) (names []string) {
		for _, a := range alerts {
			name := a.Labels["alertname"]
			if a.Time.Equal(at) && !slices.Contains(p.ignored, name) {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		return slices.Compact(names)
	}
}

// set returns a scrape in which a series has another value; it is added when it is not there.
func set(text, series string, value float64) string {
	line := fmt.Sprintf("%s %v\n", series, value)
	begin := strings.Index("\n"+text, "\n"+series+" ")
	if begin < 0 {
		return text + line
	}
	end := begin + strings.IndexByte(text[begin:], '\n') + 1
	return text[:begin] + line + text[end:]
}
