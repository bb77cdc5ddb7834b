package cli

import (
	"bytes"
	"crypto/sha3"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/test/logtest"
)

// hack/verify_audit.py is a second implementation of the verification. Both must agree on every
// log: whether it verifies, and where it breaks.

// pythonDriver verifies many exports in one process. It reads lines of arguments and writes exit
// statuses and messages.
const pythonDriver = `
import contextlib, io, json, sys
sys.path.insert(0, sys.argv[1])
import verify_audit
for line in sys.stdin:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = verify_audit.main(json.loads(line))
        except SystemExit as e:
            status = e.code
    print(json.dumps([status, out.getvalue()]))
`

// verdict is the result of a verification.
type verdict struct {
	status   int    // 0 ok, 1 broken, 2 not verified
	sequence uint64 // first bad sequence
	says     string
}

func (v verdict) String() string {
	return fmt.Sprintf("status %d, sequence %d: %s", v.status, v.sequence, v.says)
}

// both collects exports and verifies them with both implementations.
type both struct {
	t     *testing.T
	dir   string
	cases []comparison
}

type comparison struct {
	name string
	args []string // arguments for both, without the file
	file string
	// unsigned marks a change that only the signature reveals, which Python does not check. If
	// Python finds a fault, it must be the same one.
	unsigned bool
	// closing marks a change of the last line. Only its signature tells whether that line or the
	// entries were changed.
	closing bool
}

func newBoth(t *testing.T) *both {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("python3 is not installed: the second implementation is not held against the first")
	}
	return &both{t: t, dir: t.TempDir()}
}

func (b *both) add(name string, lines []string, args ...string) *comparison {
	b.t.Helper()
	file := logtest.WriteText(b.t, filepath.Join(b.dir, fmt.Sprintf("%d.jsonl", len(b.cases))), strings.Join(lines, ""))
	b.cases = append(b.cases, comparison{name: name, args: args, file: file})
	return &b.cases[len(b.cases)-1]
}

// first returns the program's verdict.
func (b *both) first(c comparison) (v verdict) {
	var out bytes.Buffer
	cmd := Command()
	cmd.SetArgs(append([]string{"audit", "verify", "--file", c.file}, c.args...))
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	err := cmd.ExecuteContext(b.t.Context())
	v.says = out.String()
	if broken, ok := audit.IsBroken(err); ok {
		return verdict{1, broken.Sequence, err.Error()}
	} else if err != nil {
		return verdict{2, 0, err.Error()}
	}
	return v
}

// second returns Python's verdicts on all exports.
func (b *both) second() (all []verdict) {
	b.t.Helper()
	hack, err := filepath.Abs("../../hack")
	if err != nil {
		b.t.Fatal(err)
	}
	var in, out, failed bytes.Buffer
	for _, c := range b.cases {
		args := append([]string{c.file}, c.args...)
		for i, a := range args {
			if i > 0 && args[i-1] == "--tenant" && a == "system" { // here it is a switch
				args = append(args[:i], args[i+1:]...)
				break
			}
		}
		line, err := json.Marshal(args)
		if err != nil {
			b.t.Fatal(err)
		}
		in.Write(append(line, '\n'))
	}
	cmd := exec.CommandContext(b.t.Context(), "python3", "-B", "-c", pythonDriver, hack)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = &in, &out, &failed
	if err := cmd.Run(); err != nil {
		b.t.Fatalf("%v: %s", err, failed.String())
	}
	for line := range strings.Lines(out.String()) {
		var said []any
		if err := json.Unmarshal([]byte(line), &said); err != nil {
			b.t.Fatal(err)
		}
		v := verdict{status: int(said[0].(float64)), says: said[1].(string)}
		if _, after, ok := strings.Cut(v.says, "broken at sequence "); ok {
			_, _ = fmt.Sscanf(after, "%d", &v.sequence)
		}
		all = append(all, v)
	}
	if len(all) != len(b.cases) {
		b.t.Fatalf("%d verdicts of %d exports", len(all), len(b.cases))
	}
	return all
}

// agree compares the verdicts. It returns the number of valid and of broken exports.
func (b *both) agree() (good, bad int) {
	b.t.Helper()
	second := b.second()
	for i, c := range b.cases {
		one, two := b.first(c), second[i]
		if one.status == 0 {
			good++
		} else {
			bad++
		}
		if c.unsigned && one.status == 1 && two.status == 0 {
			continue
		}
		if c.closing && one.status == 1 && two.status == 1 && one.sequence == two.sequence+1 {
			continue
		}
		if one.status != two.status || one.sequence != two.sequence {
			b.t.Errorf("%s %v\nfirst:  %v\nsecond: %v", c.name, c.args, one, two)
		}
		if one.status == 0 { // the summary that both print
			for line := range strings.Lines(one.says) {
				known := strings.HasPrefix(line, "head: ") || strings.HasPrefix(line, "rollback: ") ||
					strings.HasPrefix(line, "tree: ") && strings.Contains(two.says, "the whole log")
				if known && !strings.Contains(two.says, line) {
					b.t.Errorf("%s: the second does not say %q: %s", c.name, line, two.says)
				}
			}
		}
	}
	return good, bad
}

// logs returns logs of every kind.
func logs(t *testing.T) map[string]*logtest.Log {
	all := map[string]*logtest.Log{}
	for _, signing := range []writer.Signing{writer.SignEntries, writer.SignBatches} {
		b := logtest.New(t, signing)
		all["new, "+string(signing)] = b
		b = logtest.New(t, signing)
		b.Fill()
		all["filled, "+string(signing)] = b
		b = logtest.New(t, signing)
		b.Fill()
		b.LoseTo(40)
		b.Fill()
		b.LoseTo(90)
		b.Group(3)
		all["rolled back, "+string(signing)] = b
	}
	b := logtest.New(t, writer.SignEntries)
	b.Fill()
	b.Audit.SetSigning(writer.SignBatches)
	b.Fill()
	b.Audit.SetSigning(writer.SignEntries)
	b.Fill()
	all["both modes"] = b
	return all
}

func TestTwoImplementationsAgreeOnLogsThatHold(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: runs Python on whole logs")
	}
	t.Parallel()
	b, cut := newBoth(t), newBoth(t)
	for name, l := range logs(t) {
		lines := l.Export(0)
		b.add(name, lines)
		b.add(name, lines, "--fingerprint", l.Fingerprint())
		b.add(name, append(lines[:len(lines)-1:len(lines)-1], strings.TrimSuffix(lines[len(lines)-1], "\n")))
		pem := logtest.WriteText(t, filepath.Join(t.TempDir(), "audit.pem"), string(l.Key.Public().MarshalPEM()))
		b.add(name, lines, "--public-key", pem)
		note := logtest.WriteText(t, filepath.Join(t.TempDir(), "note"), logtest.NoteOf(t, lines))
		b.add(name+", since", lines, "--since", note)
		b.add(name+", of system", logtest.OfTenant(lines, "system"), "--tenant", "system")
		if len(lines) < 5 {
			continue
		}
		for _, tenant := range []string{"ten_a", "ten_b"} {
			own := logtest.OfTenant(lines, tenant)
			b.add(name+", of "+tenant, own)
			cut.add(name+", of "+tenant+" without its end", own[:len(own)-1], "--fingerprint", l.Fingerprint())
		}
		var last struct{ Sequence uint64 }
		for _, line := range lines[1 : len(lines)-1] {
			if err := json.Unmarshal([]byte(line), &last); err != nil {
				t.Fatal(err)
			}
			from := fmt.Sprint(last.Sequence)
			b.add(name+", from "+from, l.Export(last.Sequence), "--from", from, "--public-key", pem)
		}
		b.add(name+", later part of the whole", lines, "--from", "5", "--public-key", pem)
		before := logtest.NoteOf(t, lines)
		l.Fill()
		file := logtest.WriteText(t, filepath.Join(t.TempDir(), "before"), before)
		b.add(name+", grown", l.Export(0), "--since", file)
	}
	if good, bad := b.agree(); bad > 0 || good < 100 {
		t.Errorf("%d logs hold, %d do not", good, bad)
	}
	if good, bad := cut.agree(); good > 0 || bad < 2 {
		t.Errorf("without their end %d logs hold, %d do not", good, bad)
	}
}

func TestTwoImplementationsAgreeOnTheFirstBadSequence(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: runs Python on hundreds of damaged logs")
	}
	t.Parallel()
	b := newBoth(t)
	random := rand.New(rand.NewPCG(1, 2))
	all := logs(t)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		l := all[name]
		lines := l.Export(0)
		b.mutate(l, name, lines, random)
		pem := logtest.WriteText(t, filepath.Join(t.TempDir(), "audit.pem"), string(l.Key.Public().MarshalPEM()))
		if len(lines) < 5 {
			continue
		}
		b.mutate(l, name+", of ten_a", logtest.OfTenant(lines, "ten_a"), random)
		b.mutate(l, name+", of system", logtest.OfTenant(lines, "system"), random, "--tenant", "system")
		b.mutate(l, name+", from 8", l.Export(8), random, "--from", "8", "--public-key", pem)
		b.add(name+", another from", l.Export(8), "--from", "9", "--public-key", pem)
		b.add(name+", another from", l.Export(8), "--from", "7", "--public-key", pem)
		b.add(name+", without its beginning", l.Export(9))
		b.add(name+", another fingerprint", lines, "--fingerprint", strings.Repeat("0", 64))
		other := logtest.New(t, writer.SignEntries)
		other.Fill()
		pem = logtest.WriteText(t, filepath.Join(t.TempDir(), "audit.pem"), string(other.Key.Public().MarshalPEM()))
		b.add(name+", another key", lines, "--public-key", pem)
		b.add(name+", another log's end", append(lines[:len(lines)-1:len(lines)-1], other.Export(0)[len(other.Export(0))-1]))
	}
	good, bad := b.agree()
	if t.Logf("%d mutated logs hold, %d do not", good, bad); bad < 1000 || good > bad/20 {
		t.Error("most changes are to be found")
	}
}

func TestTwoImplementationsAgreeOnAnOlderCheckpoint(t *testing.T) {
	b := newBoth(t)
	for _, signing := range []writer.Signing{writer.SignEntries, writer.SignBatches} {
		l := logtest.New(t, signing)
		l.Fill()
		early := l.Export(0)
		l.Fill()
		late := l.Export(0)
		note := logtest.WriteText(t, filepath.Join(t.TempDir(), "late"), logtest.NoteOf(t, late))
		b.add("cut", early, "--since", note)
		l.LoseTo(100)
		l.Group(3)
		b.add("gone on", l.Export(0), "--since", note)
		fork := logtest.NewWithKey(t, signing, l.Key)
		fork.Fill()
		b.add("shorter fork", fork.Export(0), "--since", note)
		fork.Fill()
		fork.Fill()
		b.add("fork", fork.Export(0), "--since", note)
		lost := logtest.NewWithKey(t, signing, l.Key)
		lost.Fill()
		lost.LoseTo(50)
		lost.Fill()
		lost.Fill()
		b.add("lost", lost.Export(0), "--since", note)
	}
	if good, bad := b.agree(); good != 2 || bad != 8 {
		t.Errorf("%d logs hold, %d do not", good, bad)
	}
}

// mutate adds the log with changes of all kinds, one at a time.
func (b *both) mutate(l *logtest.Log, name string, lines []string, random *rand.Rand, args ...string) {
	with := func(kind string, i, n int, put ...string) *comparison {
		changed := append(append(append([]string{}, lines[:i]...), put...), lines[i+n:]...)
		return b.add(fmt.Sprintf("%s: %s at line %d", name, kind, i+1), changed, args...)
	}
	ofTenant := strings.Contains(name, ", of ")
	for i, line := range lines {
		always := strings.Contains(line, string(audit.RollbackAccepted)) || i <= 1 || i >= len(lines)-2
		if len(lines) > 12 && !always && random.IntN(len(lines)) > 0 {
			continue // only a sample of a long log
		}
		with("deleted", i, 1)
		with("repeated", i, 0, line)
		if i > 0 {
			with("moved", i-1, 2, line, lines[i-1])
		}
		b.add(fmt.Sprintf("%s: cut behind line %d", name, i), lines[:i], args...)
		signatures := signatureAt(b.t, line)
		for range 3 {
			at := random.IntN(len(line))
			flipped := []byte(line)
			flipped[at] ^= 1 << random.IntN(8)
			c := with(fmt.Sprintf("bit flipped at %d", at), i, 1, string(flipped))
			c.closing = i == len(lines)-1
			c.unsigned = at >= signatures[0] && at < signatures[1]
			if c.closing && ofTenant { // One tenant's entries are too few to make the tree that the text names.
				begin, end := strings.Index(line, `\n`), strings.Index(line, `\n\n`)
				c.unsigned = c.unsigned || at > begin && at < end
			}
		}
		for _, change := range [][2]string{
			{`","`, `", "`}, {`"sequence":`, `"sequence":0`}, {`"sequence":`, `"sequence":1e0`}, {`"outcome":"s`, `"outcome":"\u0073`},
			{"\n", "\r\n"}, {"\n", ""}, {"\n", "\n\n"}, {`"req"`, `"req\ud800"`}, {`"req"`, "\"req\xff\""}, {`"req"`, `null`},
			{`{"actor":`, `{"actor":{},"actor":`}, {`"tenant_id":`, `"tenant_id":"x","tenant_id":`}, {`"attributes":{`, `"attributes":{"":"",`},
		} {
			if changed := strings.Replace(line, change[0], change[1], 1); changed != line {
				with(fmt.Sprintf("%q for %q", change[1], change[0]), i, 1, changed)
			}
		}
		// Forged with the signing key: only the links reveal it.
		for kind, change := range forgeries {
			if forged := forge(l, line, change); forged != "" && forged != line {
				with(kind, i, 1, forged)
			}
		}
		var e map[string]any
		if err := json.Unmarshal([]byte(line), &e); err != nil || e["signature"] == nil {
			continue
		}
		signature, err := base64.StdEncoding.DecodeString(e["signature"].(string))
		if err != nil {
			b.t.Fatal(err)
		}
		if signature[0] != 2 || len(signature) < 3400 || ofTenant {
			continue
		}
		for _, at := range []int{1, 3, 4, 5, 7, 8, 9, 20, len(signature) - 3310} { // n, index and path
			changed := bytes.Clone(signature)
			changed[at] ^= 1
			with(fmt.Sprintf("byte %d of the group's proof changed", at), i, 1,
				strings.Replace(line, e["signature"].(string), base64.StdEncoding.EncodeToString(changed), 1))
		}
	}
	with("something", len(lines), 0, "junk\n")
	with("nothing", 0, len(lines))
}

// forgeries are changes of an entry that is then hashed and signed again.
var forgeries = map[string]func(e *audit.Entry){
	"something else in it":           func(e *audit.Entry) { e.Outcome = audit.Denied },
	"another previous hash":          func(e *audit.Entry) { e.PreviousHash = strings.Repeat("1", 64) },
	"another of the tenant":          func(e *audit.Entry) { e.TenantPreviousHash = strings.Repeat("1", 64) },
	"an earlier time":                func(e *audit.Entry) { e.Timestamp = "2026-11-21T11:59:59.999999Z" },
	"a time that is none":            func(e *audit.Entry) { e.Timestamp = "2026-02-30T12:00:00.000000Z" },
	"a time of another form":         func(e *audit.Entry) { e.Timestamp = "2026-11-22T12:00:00.00000Z" },
	"another key":                    func(e *audit.Entry) { e.KeyID = strings.Repeat("2", 64) },
	"a later sequence":               func(e *audit.Entry) { e.Sequence++ },
	"a much later sequence":          func(e *audit.Entry) { e.Sequence += 1000 },
	"an earlier sequence":            func(e *audit.Entry) { e.Sequence -= min(e.Sequence, 2) },
	"a later sequence of the tenant": func(e *audit.Entry) { e.TenantSequence++ },
	"no sequence of the tenant":      func(e *audit.Entry) { e.TenantSequence = 0 },
	"another tenant":                 func(e *audit.Entry) { e.TenantID = "ten_c" },
	"of the system":                  func(e *audit.Entry) { e.TenantID = "system" },
	"another type":                   func(e *audit.Entry) { e.EventType = audit.RollbackAccepted },
	"another chain":                  func(e *audit.Entry) { e.Attributes["chain_id"] = "" },
	"a key that is none":             func(e *audit.Entry) { e.Attributes["public_key"] = "AAAA" },
	"a rollback that skips nothing": func(e *audit.Entry) {
		e.EventType, e.Outcome = audit.RollbackAccepted, audit.Success
		e.Attributes = map[string]string{"epoch": "9", "lost_from": fmt.Sprint(e.Sequence), "lost_to": fmt.Sprint(e.Sequence - 1)}
	},
	"a rollback of later entries": func(e *audit.Entry) {
		e.EventType, e.Outcome = audit.RollbackAccepted, audit.Success
		e.Attributes = map[string]string{"epoch": "9", "lost_from": fmt.Sprint(e.Sequence), "lost_to": fmt.Sprint(e.Sequence + 9)}
		e.Sequence += 10
	},
	"a rollback that was denied": func(e *audit.Entry) {
		e.EventType, e.Outcome = audit.RollbackAccepted, audit.Denied
		e.Attributes = map[string]string{"epoch": "9", "lost_from": fmt.Sprint(e.Sequence), "lost_to": fmt.Sprint(e.Sequence + 9)}
		e.Sequence += 10
	},
	"a former epoch":             func(e *audit.Entry) { e.Attributes["epoch"] = "1" },
	"an epoch spelled otherwise": func(e *audit.Entry) { e.Attributes["epoch"] = "09" },
	"more that is lost":          func(e *audit.Entry) { e.Attributes["lost_from"] = "3" },
	"less that is lost":          func(e *audit.Entry) { e.Attributes["lost_to"] = "39" },
}

// forge returns a changed entry with its own signature, and "" if the line has none.
func forge(b *logtest.Log, line string, change func(*audit.Entry)) string {
	b.T.Helper()
	e, err := audit.ParseEntry([]byte(strings.TrimSuffix(line, "\n")))
	if err != nil {
		return ""
	}
	was, err := json.Marshal(e)
	if err != nil {
		b.T.Fatal(err)
	}
	change(e)
	if now, err := json.Marshal(e); err != nil || bytes.Equal(was, now) {
		return ""
	}
	whole, err := e.JSON()
	if err != nil {
		b.T.Fatal(err)
	}
	core := strings.Replace(string(whole), `"hash":"`+e.Hash+`",`, "", 1)
	core = strings.Replace(core, `"signature":"`+e.Signature+`",`, "", 1)
	sum := sha3.Sum256([]byte(core))
	signature, err := b.Key.Sign("latticekeep/audit/v1", sum[:])
	if err != nil {
		b.T.Fatal(err)
	}
	e.Hash, e.Signature = hex.EncodeToString(sum[:]), base64.StdEncoding.EncodeToString(signature)
	if whole, err = e.JSON(); err != nil {
		b.T.Fatal(err)
	}
	return string(whole) + "\n"
}

// signatureAt returns the range of a line that contains the signature, which Python does not check.
func signatureAt(t *testing.T, line string) (at [2]int) {
	t.Helper()
	begin, end := `"signature":"`, `"`
	if strings.HasPrefix(line, checkpointPrefix) {
		begin, end = "\u2014 ", `\n"}`
	}
	before, rest, ok := strings.Cut(line, begin)
	signature, _, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatal("no signature in ", line)
	}
	return [2]int{len(before) + len(begin), len(before) + len(begin) + len(signature)}
}

func TestThePythonVerifierExplainsItself(t *testing.T) {
	newBoth(t)
	out, err := exec.CommandContext(t.Context(), "python3", "-B", "../../hack/verify_audit.py", "--help").CombinedOutput()
	if err != nil || !bytes.Contains(out, []byte("does\nnot check ML-DSA-65 signatures")) {
		t.Errorf("%v: %s", err, out)
	}
	missing := filepath.Join(t.TempDir(), "none")
	out, err = exec.CommandContext(t.Context(), "python3", "-B", "../../hack/verify_audit.py", missing).CombinedOutput()
	if failed := new(exec.ExitError); !errors.As(err, &failed) || failed.ExitCode() != 2 {
		t.Errorf("%v: %s", err, out)
	}
}
