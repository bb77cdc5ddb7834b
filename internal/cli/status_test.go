package cli

import (
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/test/logtest"
)

// An exit status tells damage from an outage, from a refusal and from a typing mistake.
func TestExitStatusesTellWhatHappened(t *testing.T) {
	t.Parallel() // it mostly waits
	a := startAudited(t)
	a.use(3)
	folder := t.TempDir()
	file := filepath.Join(folder, "log.jsonl")
	a.mustAudit("export", "--output", file)
	text := readText(t, file)
	tampered := logtest.WriteText(t, filepath.Join(folder, "tampered"), strings.Replace(text, "CREDENTIAL_UNSEALED", "CREDENTIAL_SEALED", 1))

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	down := "http://" + listener.Addr().String()
	must(t, listener.Close()) // nobody listens there any more
	broken := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusServiceUnavailable) }))
	t.Cleanup(broken.Close)
	cut := middle(t, a.BaseURL, func(_ string, body []byte) []byte { return body })
	whole := cut.Config.Handler
	cut.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		whole.ServeHTTP(short{w}, r)
	})
	server, key := []string{"--url", a.BaseURL}, []string{"--api-key", a.APIKey}
	with := func(args string, more ...[]string) []string {
		all := strings.Fields(args)
		for _, m := range more {
			all = append(all, m...)
		}
		return all
	}
	for _, c := range []struct {
		status int
		says   string
		args   []string
	}{
		{0, "", with("audit verify --file", []string{file})},
		{0, "", with("audit verify", server, key)},
		{0, "", with("apikey --help")},

		{1, "the chain is broken at sequence", with("audit verify --file", []string{tampered})},
		{1, "another log", with("audit verify --file", []string{file, "--fingerprint", strings.Repeat("0", 64)})},
		{1, "another log", with("audit verify --fingerprint "+strings.Repeat("0", 64), server, key)},
		{1, "the chain is broken", with("compliance score --framework soc2 --file", []string{tampered})},

		{2, `there is no flag --foo; run "latticekeep audit verify --help"`, with("audit verify --foo")},
		{2, `there is no flag -x; run "latticekeep audit verify --help"`, with("audit verify -x")},
		{2, `--days needs a value; run "latticekeep apikey create --help"`, with("apikey create x --days")},
		{2, `--days cannot be "-5": it takes a whole number from 1 to 3650; run`, with("apikey create x --days -5")},
		{2, `--json cannot be "x": it takes true or false; run`, with("tenant list --json=x")},
		{2, `--scope is needed; run "latticekeep apikey create --help"`, with("apikey create x")},
		{2, "--cert-file, --key-file and --token-file are needed; run", with("webhook")},
		{2, `latticekeep apikey create needs NAME, and was given 0 arguments; run "latticekeep apikey create --help"`, with("apikey create --scope vault:read")},
		{2, "latticekeep user role needs USER_ID ROLE, and was given 1 arguments; run", with("user role x")},
		{2, `unexpected argument "more": latticekeep version takes flags only; run "latticekeep version --help"`, with("version more")},
		{2, "one of --from-literal, --from-file and --filename is needed; run", with("seal --type x --key x")},
		{2, `--config and --dev exclude each other: give one of them; run "latticekeep server --help"`, with("server --dev --config x")},
		{2, `latticekeep has no command "vault"; run "latticekeep --help"`, with("vault get db")},
		{2, `latticekeep audit has no command "veify"; did you mean verify?; run "latticekeep audit --help"`, with("audit veify")},
		{2, `no server: set --url or LATTICEKEEP_URL, or run latticekeep login; run "latticekeep tenant list --help"`, with("tenant list")},
		{2, "say which log", with("audit verify")},
		{2, "--tenant is empty", with("audit verify --tenant=")},
		{2, "the base URL is not one like", with("tenant list --url none", key)},
		{2, "plain HTTP to another machine", with("tenant list --url http://vault.example.org", key)},

		{3, "no such file", with("audit verify --file", []string{filepath.Join(folder, "none")})},
		{3, "no such file", with("audit verify --data-dir", []string{filepath.Join(folder, "none")})},
		{3, "reading the API key", with("audit verify --api-key-file none", server)},
		{3, "connection refused", with("audit verify", key, []string{"--url", down})},
		{3, "connection refused", with("seal --name x --namespace x --type x --from-literal a=b --url", []string{down})},
		{3, "answered 503", with("audit verify", key, []string{"--url", broken.URL})},
		{3, "answered 503", with("seal --name x --namespace x --type x --from-literal a=b --url", []string{broken.URL})},
		{3, "unexpected EOF", with("audit verify", key, []string{"--url", cut.URL})},
		{3, "unexpected EOF", with("audit verify --whole --api-key", []string{a.systemKey, "--url", cut.URL})},

		{4, "answered 401", with("audit verify --api-key lk_live_none", server)},
		{4, "answered 403", with("audit verify --whole", server, key)},
		{4, "answered 404", with("apikey revoke key_aaaaaaaaaaaaaaaaaaaaaaaaaa", server, key)},
		{4, "answered 400", with("compliance report --framework none --output", []string{filepath.Join(folder, "report")}, server, key)},
	} {
		if _, err := run(t, c.args...); ExitStatus(err) != c.status || !strings.Contains(fmt.Sprint(err), c.says) {
			t.Errorf("%v: status %d, want %d and %q: %v", c.args, ExitStatus(err), c.status, c.says, err)
		}
	}

	// The agent tries again after a 429, and ends with its own words when its time is over.
	if err := fault.New(fault.Exhausted, "too many requests"); ExitStatus(err) != command.StatusRefused {
		t.Errorf("%v: status %d, want %d", err, ExitStatus(err), command.StatusRefused)
	}

	// No change to an export looks like an outage. Only the last line may be missing, as in an export
	// that was interrupted.
	full := filepath.Join(folder, "whole")
	mustRun(t, "audit", "export", "--whole", "--url", a.BaseURL, "--api-key", a.systemKey, "--output", full)
	text = readText(t, full)
	mutations := 0
	try := func(what, changed string) {
		mutations++
		logtest.WriteText(t, tampered, changed)
		if _, err := run(t, "audit", "verify", "--file", tampered); ExitStatus(err) != 1 {
			t.Errorf("%s: status %d: %v", what, ExitStatus(err), err)
		}
	}
	for i := 0; i < len(text); i += len(text)/100 + 1 {
		try(fmt.Sprintf("byte %d changed", i), text[:i]+string(text[i]^1)+text[i+1:])
		try(fmt.Sprintf("cut at %d", i), text[:i])
	}
	lines := strings.SplitAfter(strings.TrimSuffix(text, "\n"), "\n")
	for i := range lines[:len(lines)-1] {
		try(fmt.Sprintf("without line %d", i), strings.Join(lines[:i], "")+strings.Join(lines[i+1:], ""))
	}
	if mutations < 200 {
		t.Errorf("only %d mutations", mutations)
	}
}

// short is a ResponseWriter that drops the connection in the middle of the answer.
type short struct{ http.ResponseWriter }

func (s short) Write(p []byte) (int, error) {
	_, _ = s.ResponseWriter.Write(p[:len(p)/2])
	panic(http.ErrAbortHandler)
}

// No command speaks in the words of the library that parses command lines.
func TestUsageErrorsAreInOurWords(t *testing.T) {
	foreign := regexp.MustCompile(`arg\(s\)|flag\(s\)|flags in the group|if any flags|unknown (flag|command|shorthand)|flag needs|invalid argument|strconv|accepts `)
	var each func(cmd *cobra.Command)
	each = func(cmd *cobra.Command) {
		path := strings.Fields(strings.TrimPrefix(cmd.CommandPath(), "latticekeep"))
		for _, more := range [][]string{{"--none"}, {"-%"}, {"a", "b", "c"}, {"--help=x"}, {}} {
			if len(more) == 0 && (cmd.HasSubCommands() || cmd.Name() == "version" || cmd.Name() == "help" || cmd.Name() == "validate") {
				continue // needs nothing
			}
			_, err := run(t, append(path, more...)...)
			if strings.Contains(cmd.Use, "FILE...") && len(more) == 3 {
				more = nil // as many arguments as one likes
			} else if ExitStatus(err) != command.StatusUsage {
				t.Errorf("%v %v: status %d: %v", path, more, ExitStatus(err), err)
			}
			text := fmt.Sprint(err)
			if foreign.MatchString(text) || ExitStatus(err) == command.StatusUsage && !strings.HasSuffix(text, fmt.Sprintf("; run \"%s --help\"", cmd.CommandPath())) {
				t.Errorf("%v %v: %v", path, more, err)
			}
		}
		for _, c := range cmd.Commands() {
			each(c)
		}
	}
	each(Command())
}
