package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTranscriptIsTheSameOnEachRunAndShowsNoSecret(t *testing.T) {
	for _, tc := range []struct{ command, printed, want string }{
		{"kubectl get pods", "latticekeep-webhook-5d8c7fcb8-x2l4k   Running\nlatticekeep-0   Running\n", "latticekeep-webhook-<suffix>          Running\nlatticekeep-0   Running\n"},
		{"kubectl wait", "pod/latticekeep-csi-provider-dk9jp condition met\n", "pod/latticekeep-csi-provider-<suffix> condition met\n"},
		{"helm install", "LAST DEPLOYED: Sat Nov 21 15:21:00 2026\n", "LAST DEPLOYED: <time>\n"},
		{"kubectl logs", "at 2026-11-21T15:21:00.588891623Z, and 2026-11-21T15:21:00+01:00\n\n", "at <time>, and <time>\n"},
		{"curl", "Bearer eyJhbGciOiJSUzI1NiJ9.eyJhdWQiOiJ4In0.c2ln-_x\n", "Bearer <token>\n"},
		{"kubectl get -o json", "cred_mfrggzdfmztwq2lknnwg23tpoa 00c18e09-1ac1-4a3d-8389-90bf59abbcbd", "<credential>                    <uid>\n"},
		{"helm test", "head: 3 " + strings.Repeat("0f", 32) + "\n", "head: <sequence> <hash>\n"},
		{"latticekeep backup verify", "ok: a.backup: 311 rows, taken 2026-11-21T15:21:00Z\nits log up to head 24 " + strings.Repeat("0f", 32) + " and all its rows hold\n", "ok: a.backup: <count> rows, taken <time>\nits log up to head <sequence> <hash> and all its rows hold\n"},
		{"helm test", "ok: 4 entries, 1 to 14\ncheckpoint: entry 14 is in the tree of 18 entries, epoch 1\n", "ok: 4 entries, 1 to <sequence>\ncheckpoint: entry <sequence> is in the tree of <size> entries, epoch 1\n"},
		{"kubectl logs", "msg=serving key_set=" + strings.Repeat("0f", 32) + " revision=1 key_id=1-" + strings.Repeat("0f", 31) + "\n", "msg=serving key_set=<id> revision=1 key_id=<key id>\n"},
		{"kubectl logs", "retrying\" in=8s error=\"does not answer: calling the server: dial tcp 10.96.55.240:8200\"\n", "retrying\" in=<pause> error=\"does not answer: <cause>\"\n"},
		{"latticekeep restore", "by latticekeep (devel)\n", "by latticekeep <version>\n"},
		{"latticekeep kms-plugin init", "key set " + strings.Repeat("0f", 32) + "\n", "key set <id>\n"},
		{"kubectl get --raw /metrics", `a{key_id_hash="sha256:` + strings.Repeat("0f", 32) + "\"} 1\n", "a{key_id_hash=\"sha256:<hash>\"} 1\n"},
		{"kubectl logs", "SHA-256 " + strings.Repeat("0f", 32), "SHA-256 " + strings.Repeat("0f", 32) + "\n"},
		{"seal --identity 1f0c", "/tmp/latticekeep-e2e-17/data", "<folder>/data\n"},
		{"kubectl apply --filename hack/e2e/manifests/namespaces.yaml", "", ""},
	} {
		var out bytes.Buffer
		transcript := newTranscript(&out)
		transcript.hide("/tmp/latticekeep-e2e-17", "<folder>")
		transcript.hide("1f0c", "<identity>")
		transcript.console(tc.command, tc.printed)
		want := "\n```console\n$ " + strings.ReplaceAll(tc.command, "1f0c", "<identity>") + "\n" + tc.want + "```\n"
		if got := out.String(); got != want {
			t.Errorf("%q became %q, want %q", tc.printed, got, want)
		}
		file := filepath.Join(t.TempDir(), "transcript.md")
		if err := transcript.write(file); err != nil {
			t.Fatal(err)
		}
		if written, err := os.ReadFile(file); err != nil || string(written) != want {
			t.Errorf("the file is %q (%v), want %q", written, err, want)
		}
		next := newTranscript(io.Discard)
		if err := errors.Join(next.resume(file), next.write(file)); err != nil {
			t.Fatal(err)
		}
		if written, err := os.ReadFile(file); err != nil || string(written) != want {
			t.Errorf("resumed, the file is %q (%v), want %q", written, err, want)
		}
	}
}

func TestValuesAreComparedWithThoseOfBeforeTheMove(t *testing.T) {
	before := held{"cred_a", "digest"}
	for _, tc := range []struct {
		before, now held
		want        string
	}{
		{before, before, keptEntry},
		{held{"cred_a", ""}, held{"cred_a", ""}, keptEntry},
		{before, held{"cred_b", "digest"}, keptValues},
		{before, held{"", "digest"}, onlySecret},
		{before, held{"", ""}, noValues},
		{before, held{"cred_b", "another"}, newValues},
		{before, held{"cred_a", "another"}, newValues},
		{held{"cred_a", ""}, held{"cred_b", ""}, newValues},
	} {
		if got := compared(tc.before, tc.now); got != tc.want {
			t.Errorf("%v after %v is %q, want %q", tc.now, tc.before, got, tc.want)
		}
	}
}
