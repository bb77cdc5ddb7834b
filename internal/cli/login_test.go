package cli

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// script runs lines of testscript in a folder with files, against a server. They have BASE and
// API_KEY of it and a home of their own, and no settings.
func (r *running) script(lines string, files map[string]string, commands map[string]func(*testscript.TestScript, bool, []string)) {
	r.t.Helper()
	dir := r.t.TempDir()
	must(r.t, os.WriteFile(filepath.Join(dir, "script.txt"), []byte(lines), 0o600))
	testscript.Run(r.t, testscript.Params{Dir: dir, Cmds: commands, Setup: func(e *testscript.Env) error {
		for name, text := range files {
			if err := os.WriteFile(filepath.Join(e.WorkDir, name), []byte(text), 0o600); err != nil {
				return err
			}
		}
		e.Setenv("BASE", r.BaseURL)
		e.Setenv("API_KEY", r.APIKey)
		e.Setenv("XDG_CONFIG_HOME", filepath.Join(e.WorkDir, "settings"))
		return os.WriteFile(filepath.Join(e.WorkDir, "api-key"), []byte(r.APIKey+"\n"), 0o600)
	}})
}

// mode compares the mode of a file with one, as ls writes it.
func mode(ts *testscript.TestScript, _ bool, args []string) {
	info, err := os.Stat(ts.MkAbs(args[0]))
	ts.Check(err)
	if got := info.Mode().String(); got != args[1] {
		ts.Fatalf("%s has mode %s, want %s", args[0], got, args[1])
	}
}

// After a login no command needs a URL or a key, and a key that the server refuses is not stored. The
// key is in no output.
func TestALoginServesEveryCommand(t *testing.T) {
	server := start(t, t.TempDir())
	t.Cleanup(server.end)
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-API-Key") != "" {
			t.Error("the key of a profile was sent to another server")
		}
		w.WriteHeader(http.StatusForbidden)
	}))
	t.Cleanup(other.Close)
	server.script(strings.ReplaceAll(`
! latticekeep apikey list
stderr 'no server: set --url or LATTICEKEEP_URL, or run latticekeep login'
! latticekeep logout
stderr 'there is no profile default'

# a key that the server refuses, one that is none, and no server
stdin wrong-key
! latticekeep login --url $BASE
stderr '401'
! stderr lk_live_aaaa
stdin empty
! latticekeep login --url $BASE
stderr 'not an API key'
stdin two
! latticekeep login --url $BASE
stderr 'not an API key'
! stderr hunter2
stdin api-key
! latticekeep login
stderr 'no server: set --url'
stdin api-key
! latticekeep login --url $BASE --profile ../default
stderr 'the name of a profile has'
! exists settings/latticekeep/profiles/default.json

# on standard input, and from then on nothing more is needed
stdin api-key
latticekeep login --url $BASE/
stderr 'logged in to http.* as key_\w+ of dev, which may: .*vault:read'
! stderr $API_KEY
! stdout .
mode settings/latticekeep drwx------
mode settings/latticekeep/profiles drwx------
mode settings/latticekeep/profiles/default.json -rw-------
latticekeep apikey list
stdout '^key_'
latticekeep audit checkpoint
stdout .
latticekeep audit fingerprint
stdout .
latticekeep audit verify
stdout 'ok: the log of tenant'
latticekeep audit export --output log.jsonl
exists log.jsonl
latticekeep compliance score --framework soc2
! latticekeep doctor
stderr 403
! latticekeep seal --from-literal a=b --name x --namespace x --type x
stderr 'no identity is pinned'
! latticekeep audit review --email nobody@example.org --password-file empty
stderr 'signing in: .*422'
latticekeep backup keygen --output identity
cp stdout recipient
! latticekeep backup --recipient-file recipient --output backup
stderr 403

# what flags and the environment say goes before; the key goes nowhere else
! latticekeep apikey list --url $OTHER
stderr 'no API key'
! latticekeep doctor --url $OTHER
stderr 403
env LATTICEKEEP_URL=$OTHER
! latticekeep apikey list
stderr 'no API key'
latticekeep apikey list --profile default
env LATTICEKEEP_URL=$BASE LATTICEKEEP_API_KEY=lk_live_x
! latticekeep apikey list
stderr 401
env LATTICEKEEP_URL= LATTICEKEEP_API_KEY=
! latticekeep apikey list --profile default --url $BASE
stderr 'exclude each other'
! latticekeep audit verify --profile default --file log.jsonl
stderr 'exclude each other'

# other profiles
! latticekeep apikey list --profile second
stderr 'there is no profile second: run latticekeep login --profile second'
env LATTICEKEEP_PROFILE=second
! latticekeep apikey list
stderr 'there is no profile second'
stdin api-key
latticekeep login --url $BASE
latticekeep apikey list
env LATTICEKEEP_API_KEY=lk_live_x
! latticekeep apikey list
stderr 'would go to the server of that profile'
env LATTICEKEEP_API_KEY=
latticekeep logout
stderr 'logged out of profile second'
! latticekeep apikey list
env LATTICEKEEP_PROFILE=
latticekeep apikey list

# a new key takes the place of the old one, and a refused one does not
stdin wrong-key
! latticekeep login
latticekeep apikey list
stdin api-key
latticekeep login
latticekeep apikey list

# nobody else may read or change it
chmod 640 settings/latticekeep/profiles/default.json
! latticekeep apikey list
stderr 'others can read or change .*chmod 600'
chmod 600 settings/latticekeep/profiles/default.json
latticekeep apikey list
cp wrong-key settings/latticekeep/profiles/default.json
! latticekeep apikey list
stderr 'default.json is not a profile: run latticekeep login'
! stderr lk_live_
latticekeep audit verify --file log.jsonl
latticekeep apikey list --url $BASE --api-key-file api-key

# in a terminal somebody is asked
ttyin -stdin api-key
latticekeep login --url $BASE --profile typed
stderr 'API key for http://127'
latticekeep apikey list --profile typed
`, "$OTHER", other.URL), map[string]string{"wrong-key": "lk_live_aaaaaaaaaaaaaaaaaaaa\n", "empty": "\n", "two": "lk_live_x hunter2\n"},
		map[string]func(*testscript.TestScript, bool, []string){"mode": mode})
}

// Whoever names a profile is understood by every command that calls a server. The webhook is a server
// itself and acts as a ServiceAccount.
func TestEveryCommandThatCallsAServerTakesAProfile(t *testing.T) {
	eachFlag(Command(), func(cmd *cobra.Command, f *pflag.Flag) {
		if f.Name != "url" || cmd.Name() == "webhook" || cmd.Name() == "csi-provider" {
			return
		}
		p := cmd.Flags().Lookup("profile")
		if p == nil {
			p = cmd.PersistentFlags().Lookup("profile")
		}
		if p == nil || !strings.Contains(p.Usage, "LATTICEKEEP_PROFILE") {
			t.Errorf("%s takes no --profile", cmd.CommandPath())
		}
	})
}
