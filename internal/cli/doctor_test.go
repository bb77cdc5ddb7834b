package cli

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/kmstest"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// damaged is a stopped deployment, whose rows a test changes as somebody does who can write the
// database.
type damaged struct {
	*estate
	at      string
	revoked string // id of an API key
	before  map[string]string
}

// newDamaged makes a deployment in which an API key was revoked and a named key rotated.
func newDamaged(t *testing.T) *damaged {
	t.Helper()
	e, at := newEstate(t, "")
	d := &damaged{estate: e, at: at, before: e.rows(at)}
	url, end := e.serve(at)
	system := e.connect(url, e.systemKey())
	key, err := system.CreateAPIKey(t.Context(), v2.CreateAPIKeyRequest{Name: "k2", Scopes: []v2.Scope{"audit:read"}})
	must(t, err)
	end()
	d.revoked = key.KeyId
	for k, v := range e.rows(at) {
		d.before[k] = v
	}
	url, end = e.serve(at)
	must(t, e.connect(url, e.systemKey()).RevokeAPIKey(t.Context(), d.revoked))
	end()
	return d
}

func (d *damaged) put(key, value string) {
	d.t.Helper()
	d.with(d.at, func(s store.Database) {
		must(d.t, s.Update(d.t.Context(), func(tx store.Tx) error { return tx.Put([]byte(key), []byte(value)) }))
	})
}

func (d *damaged) remove(key string) {
	d.t.Helper()
	d.with(d.at, func(s store.Database) {
		must(d.t, s.Update(d.t.Context(), func(tx store.Tx) error { return tx.Delete([]byte(key)) }))
	})
}

// find returns a row whose key and value have these parts.
func (d *damaged) find(rows map[string]string, prefix, part string) (key string) {
	d.t.Helper()
	for k, v := range rows {
		if strings.HasPrefix(k, prefix) && strings.Contains(k+v, part) {
			return k
		}
	}
	d.t.Fatalf("no row under %s has %s", prefix, part)
	return ""
}

// command runs a command on the store, with or without the KMS key, and returns its output and the
// status with which the program would end.
func (d *damaged) command(withKey bool, args ...string) (out string, status int, err error) {
	d.t.Helper()
	args = append(args, "--store", d.at)
	if withKey {
		args = append(args, "--kms-key-file", d.keyFile())
	}
	var b bytes.Buffer
	cmd := Command()
	cmd.SetArgs(args)
	cmd.SetOut(&b)
	cmd.SetErr(&b)
	err = cmd.ExecuteContext(d.t.Context())
	return b.String(), ExitStatus(err), err
}

// named returns a row as doctor names it for --accept and --remove.
func (d *damaged) named(row string) string {
	d.t.Helper()
	out, _, _ := d.command(true, "doctor")
	_, after, found := strings.Cut(out, fmt.Sprintf(" %+q@", row))
	digest, _, _ := strings.Cut(after, "\n")
	digest, _, _ = strings.Cut(digest, ";")
	if !found {
		d.t.Fatalf("doctor does not say how to accept or remove %q: %s", row, out)
	}
	return fmt.Sprintf("%+q@%s", row, digest)
}

// newestOf returns the attributes of the newest entry of a type. A server begins where the commands
// have ended.
func (d *damaged) newestOf(event v2.EventType) map[string]string {
	d.t.Helper()
	url, end := d.serve(d.at)
	defer end()
	list, err := d.connect(url, d.systemKey()).QueryAuditLog(d.t.Context(), &v2.QueryAuditLogParams{EventType: &event})
	must(d.t, err)
	if len(list.Entries) == 0 {
		return nil
	}
	return list.Entries[0].Attributes
}

// toPostgres moves the deployment.
func (d *damaged) toPostgres() {
	d.t.Helper()
	to := pgtest.Shared(d.t).URL()
	mustRun(d.t, "migrate", "--from", d.at, "--to", to)
	d.at = to
}

func TestDoctorFindsWhatIsWrongInEveryStore(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"bolt", "postgres"} {
		t.Run(kind, func(t *testing.T) {
			d := newDamaged(t)
			if kind == "postgres" {
				d.toPostgres()
			}
			if out, status, err := d.command(true, "doctor"); status != 0 || !strings.HasPrefix(out, "ok: all is well\n") {
				t.Fatalf("%d %v %s", status, err, out)
			}
			if out, status, err := d.command(true, "audit", "verify"); status != 0 || !strings.Contains(out, "those that decide are what the log commits to") {
				t.Fatalf("%d %v %s", status, err, out)
			}
			if out, status, _ := d.command(false, "audit", "verify"); status != 0 || !strings.Contains(out, "were not checked: name the KMS key with --kms-key-file or --kms-url") {
				t.Errorf("%d %s", status, out)
			}

			// A flipped bit of a row under a MAC: without the KMS key nobody sees it.
			current := d.find(d.rows(d.at), "sealing/current", "")
			value := d.rows(d.at)[current]
			d.put(current, value[:5]+string([]byte{value[5] ^ 1})+value[6:])
			if _, status, err := d.command(false, "audit", "verify"); status != 0 {
				t.Error(err)
			}
			for _, command := range [][]string{{"doctor"}, {"audit", "verify"}} {
				out, status, err := d.command(true, command...)
				if status != 1 || !strings.Contains(out, `"sealing/current"`+"\n  family: sealing/current\n") || !strings.Contains(out, "its MAC is wrong") || !strings.Contains(out, "SEALING_KEY_CREATED") {
					t.Errorf("%v: %d %v %s", command, status, err, out)
				}
			}
			d.put(current, value)

			// A revoked key that works again.
			hash := d.find(d.before, "apikey/hash/", d.revoked)
			d.put(hash, d.before[hash])
			for _, withKey := range []bool{true, false} {
				out, status, err := d.command(withKey, "audit", "verify")
				if status != 1 || !strings.Contains(out, fmt.Sprintf("%+q\n  family: apikey/hash/\n", hash)) || !strings.Contains(out, "API_KEY_REVOKED") || !strings.Contains(err.Error(), "recorded its revocation here") {
					t.Errorf("%d %v %s", status, err, out)
				}
			}
			out, status, err := d.command(true, "doctor", "--explain", fmt.Sprintf("%+q", hash))
			if status != 0 || !strings.Contains(out, "state: absent\n") || !strings.Contains(out, "API_KEY_REVOKED") || !strings.Contains(out, "stored: id \""+d.revoked) || !strings.Contains(out, ": nothing\n") {
				t.Errorf("%d %v %s", status, err, out)
			}
			named := d.named(hash)
			if !strings.Contains(out, "digest: "+named[strings.LastIndex(named, "@")+1:]+"\n") {
				t.Errorf("the explanation has another digest than %s: %s", named, out)
			}
			if _, status, err := d.command(true, "doctor", "--accept", named, "--reason", "no"); status != 4 || !strings.Contains(err.Error(), "restore a backup") {
				t.Errorf("%d %v", status, err)
			}
			for _, wrong := range []string{hash, fmt.Sprintf("%+q@0123456789abcdef", hash), fmt.Sprintf("%+q@absent", hash)} {
				if _, status, err := d.command(true, "doctor", "--remove", wrong, "--reason", "it was revoked"); status != 4 || !strings.Contains(err.Error(), "igest") {
					t.Errorf("%s: %d %v", wrong, status, err)
				}
			}
			out, status, err = d.command(true, "doctor", "--remove", named, "--reason", "it was revoked")
			if status != 0 || !strings.HasPrefix(out, "rows removed: 1, entry ") {
				t.Fatalf("%d %v %s", status, err, out)
			}
			if out, status, err := d.command(true, "doctor"); status != 0 {
				t.Errorf("%d %v %s", status, err, out)
			}
			if e := d.newestOf("STATE_ROWS_REMOVED"); e == nil || e["reason"] != "it was revoked" || e["row_1"] != fmt.Sprintf("%+q", hash) {
				t.Errorf("the log has %v", e)
			}
		})
	}
}

func TestDoctorAcceptsARowForGood(t *testing.T) {
	for _, kind := range []string{"bolt", "postgres"} {
		t.Run(kind, func(t *testing.T) {
			d := newDamaged(t)
			if kind == "postgres" {
				d.toPostgres()
			}
			row := d.find(d.rows(d.at), "tenant/ten_", "")
			d.remove(row)
			out, status, _ := d.command(true, "doctor")
			if status != 1 || !strings.Contains(out, fmt.Sprintf("%+q\n", row)) || !strings.Contains(out, "removed: ") || !strings.Contains(out, "--accept ROW@DIGEST --reason TEXT") {
				t.Fatalf("%d %s", status, out)
			}
			named := d.named(row)
			if named != fmt.Sprintf("%+q@absent", row) {
				t.Error(named)
			}
			for _, wrong := range []struct {
				args   []string
				status int
				says   string
			}{
				{[]string{"--accept", named}, 2, "--reason is empty"}, {[]string{"--accept", named, "--reason", " "}, 2, "--reason is empty"},
				{[]string{"--remove", named}, 2, "--reason is empty"}, {[]string{"--reason", "x"}, 2, "--reason is for --accept and --remove"},
				{[]string{"--accept", "tenant/none@absent", "--reason", "x"}, 4, "no such row was found to be wrong"},
				{[]string{"--accept", row, "--reason", "x"}, 4, "name it as ROW@DIGEST"},
				{[]string{"--accept", fmt.Sprintf("%+q@0123456789abcdef", row), "--reason", "x"}, 4, "has changed since latticekeep doctor printed"},
				{[]string{"--accept", named, "--reason", "\u00e9"}, 4, "printable ASCII"},
				{[]string{"--accept", named, "--remove", named, "--reason", "x"}, 2, "exclude each other"},
				{[]string{"--accept", named, "--explain", row, "--reason", "x"}, 2, "exclude each other"},
			} {
				if out, status, err := d.command(true, append([]string{"doctor"}, wrong.args...)...); status != wrong.status || !strings.Contains(err.Error(), wrong.says) {
					t.Errorf("%q: %d %v %s", wrong.args, status, err, out)
				}
			}
			out, status, err := d.command(true, "doctor", "--accept", named, "--reason", "the tenant left")
			if status != 0 || !strings.HasPrefix(out, "rows accepted: 1, entry ") {
				t.Fatalf("%d %v %s", status, err, out)
			}
			if out, status, err := d.command(true, "doctor"); status != 0 {
				t.Errorf("%d %v %s", status, err, out)
			}
			if e := d.newestOf("STATE_ROWS_ACCEPTED"); e["reason"] != "the tenant left" || e["row_1"] != fmt.Sprintf("%+q", row) {
				t.Errorf("the log has %v", e)
			}
		})
	}
}

func TestDoctorSaysWhatItDidAndWhatIsLeft(t *testing.T) {
	e, at := newEstate(t, "")
	d := &damaged{estate: e, at: at}
	rows := d.rows(at)
	explain := func(row string, with, without []string) {
		t.Helper()
		out, status, err := d.command(true, "doctor", "--explain", row)
		if status != 0 {
			t.Errorf("%d %v", status, err)
		}
		for _, line := range with {
			if !strings.Contains(out, line) {
				t.Errorf("%q is explained without %q: %s", row, line, out)
			}
		}
		for _, line := range without {
			if strings.Contains(out, line) {
				t.Errorf("%q is explained with %q: %s", row, line, out)
			}
		}
	}
	key := d.find(rows, "apikey/hash/", `"vault:write"`)
	explain(key, []string{"family: apikey/hash/\nsays: ", "\nrisk: ", "\ndigest: ", "\nresource: key_", "\nwrong: nothing was found\n", ": 20 entries, ", "\n  CREDENTIAL_SEALED: 20\n"}, []string{"none that this release knows", ": nothing\n"})
	explain("zone", []string{"family: none that this release knows\n", "\nstored: nothing\n"}, []string{"says:", "resource:", "log:", "done since"})

	for i := range 34 {
		d.put(fmt.Sprintf("invitation/ten_x/inv_%02d", i), "added")
	}
	explain("invitation/ten_x/inv_00", []string{"\nwrong: its MAC is wrong", "\nwrong: added: "}, []string{"nothing was found"})
	out, status, err := d.command(true, "doctor")
	if status != 1 || !strings.Contains(err.Error(), "rows that do not hold: 34;") || strings.Contains(out, "accept \"") || !strings.Contains(out, "To accept or remove a row") {
		t.Fatalf("%d %v %s", status, err, out)
	}
	args := []string{"doctor", "--reason", "nobody was invited"}
	for _, after := range strings.Split(out, "if nobody needs it, remove ")[1:34] {
		row, _, _ := strings.Cut(after, "\n")
		args = append(args, "--remove", row)
	}
	out, status, err = d.command(true, args...)
	if status != 0 || !strings.HasPrefix(out, "rows removed: 33, entries ") || !strings.HasSuffix(out, "\nrows that still do not hold: 1\n") {
		t.Fatalf("%d %v %s", status, err, out)
	}
	out, status, err = d.command(true, "doctor", "--reason", "nobody was invited", "--remove", d.named("invitation/ten_x/inv_33"))
	if status != 0 || !strings.HasPrefix(out, "rows removed: 1, entry ") || strings.Contains(out, "still") {
		t.Fatalf("%d %v %s", status, err, out)
	}

	head := d.rows(at)["state/head"]
	d.put("state/head", head[:len(head)-1]+string([]byte{head[len(head)-1] ^ 1}))
	out, status, err = d.command(true, "doctor")
	if status != 1 || !strings.Contains(out, "do: restore a backup\n") || strings.Contains(out, "To accept or remove") {
		t.Errorf("%d %v %s", status, err, out)
	}
	explain(key, []string{"\nstate: unknown: "}, []string{"digest:"})
}

// The key of a service opens the deployment's keys as the key file does. Without an answer of the
// service doctor could not look: no row is called wrong.
func TestDoctorOpensTheKeysWithAKMSService(t *testing.T) {
	s, err := kmstest.NewVault()
	must(t, err)
	t.Cleanup(s.Close)
	for _, variable := range s.Env() {
		name, value, _ := strings.Cut(variable, "=")
		t.Setenv(name, value)
	}
	e, at := newEstateUnder(t, s.URL(), "")
	d := &damaged{estate: e, at: at}
	doctor := func(more ...string) (out string, status int, err error) {
		t.Helper()
		return d.command(false, append([]string{"doctor", "--kms-url", s.URL()}, more...)...)
	}
	calls := s.Calls()
	if out, status, err := doctor(); status != 0 || !strings.Contains(out, "with every key and MAC, and those that decide") || s.Calls() == calls {
		t.Fatalf("%d %v %s", status, err, out)
	}
	wrapping := d.find(d.rows(at), "key/ten_", "/wrapping")
	value := d.rows(at)[wrapping]
	d.put(wrapping, value[:len(value)-6]+string([]byte{value[len(value)-6] ^ 1})+value[len(value)-5:])
	out, status, err := doctor()
	if status != 1 || !strings.Contains(out, fmt.Sprintf("%+q\n", wrapping)) || !strings.Contains(out, "the KMS key does not open the wrapping key") || strings.Contains(out, "not checked") {
		t.Errorf("%d %v %s", status, err, out)
	}
	d.put(wrapping, value)
	s.SetRevoked(true)
	if out, status, err := doctor(); status != 4 || strings.Contains(out, "wrong:") {
		t.Errorf("%d %v %s", status, err, out)
	}
}

func TestDoctorSaysWhenItCouldNotLook(t *testing.T) {
	d := newDamaged(t)
	if _, status, err := d.command(false, "doctor"); status != 2 || !strings.Contains(err.Error(), "--kms-key-file or --kms-url") {
		t.Errorf("without a KMS key: %d %v", status, err)
	}
	if _, err := run(t, "doctor"); ExitStatus(err) != 2 || !strings.Contains(err.Error(), "--data-dir or --store") {
		t.Error(err)
	}
	for _, wrong := range [][]string{{"--none"}, {"row"}, {"--data-dir", "x", "--store", "y"}, {"--data-dir", "x", "--explain", ""}} {
		if _, err := run(t, append([]string{"doctor"}, wrong...)...); ExitStatus(err) != 2 {
			t.Errorf("%q: %v", wrong, err)
		}
	}
	for _, missing := range [][]string{{"--data-dir", "x", "--fingerprint", "0"}, {"--data-dir", "x"}} {
		if _, err := run(t, append([]string{"doctor"}, missing...)...); ExitStatus(err) != 3 {
			t.Errorf("%q: %v", missing, err)
		}
	}
	entry := d.find(d.rows(d.at), "audit/entry/", "API_KEY_REVOKED")
	d.remove(entry)
	if _, status, err := d.command(true, "doctor"); status != 1 || !strings.Contains(err.Error(), "broken at sequence") {
		t.Errorf("without an entry: %d %v", status, err)
	}
}
