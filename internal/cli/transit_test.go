package cli

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"strings"
	"testing"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// Data goes from standard input to standard output and back, and no data is an argument or in an error.
func TestTheCommandLineEncryptsAndSigns(t *testing.T) {
	server := start(t, t.TempDir())
	t.Cleanup(server.end)
	server.script(`
env LATTICEKEEP_URL=$BASE
stdin api-key
latticekeep login
stdin data
latticekeep encrypt
! stdout hunter2
cp stdout sealed.json
stdin sealed.json
latticekeep decrypt
cmp stdout data
exec curl -sf $BASE/api/v2/encryption/decrypt -H 'X-API-Key: '$API_KEY -H 'Content-Type: application/json' -d @sealed.json
stdout '"data":"hunter2'

latticekeep keys create orders --rotation-days 30
stdout '^orders +1 '
stdin data
latticekeep encrypt --key orders
cp stdout orders.json
stdout '"key_version": 1'
latticekeep keys rotate orders --reencrypt -o json
stdout '"version": 2'
stdin orders.json
latticekeep decrypt
cmp stdout data
latticekeep keys list
stdout '(?m)^orders +2 .* tkey_\w+'
stdout '(?m) default$'
latticekeep keys create orders
stdin data
! latticekeep encrypt --key orders
stderr '2 keys have the name orders: give the id of one of them, tkey_\w+, tkey_'
stdin data
! latticekeep encrypt --key none
stderr 'there is no key none'
! latticekeep keys rotate none

stdin data
latticekeep sign
cp stdout signatures.json
stdin data
latticekeep verify --signatures signatures.json
stdout '^valid$'
stdin data
latticekeep sign --jws
stdout '^eyJ[-_A-Za-z0-9]+\.[-_A-Za-z0-9]+\.[-_A-Za-z0-9]+\n$'
stdin other
! latticekeep verify --signatures signatures.json
stderr 'not valid'
exec sh statuses.sh
stdout '^0 1 2 4 $'

! latticekeep encrypt hunter2
stderr 'unexpected argument: others can read those'
! stderr hunter2
stdin binary
! latticekeep encrypt
stderr 'not text in UTF-8'
stdin empty
! latticekeep sign
stderr 'standard input is empty'
stdin data
! latticekeep decrypt
stderr 'not the JSON that latticekeep encrypt prints'
! stderr hunter2
stdin data
! latticekeep verify --signatures data
stderr '--signatures is not a file with the JSON'
! stderr hunter2
ttyin -stdin data
! latticekeep encrypt
stderr 'standard input is a terminal'

# who did it
latticekeep audit search --event DATA_ENCRYPTED --hours 1
stdout '(?m)^[0-9]+ +20.* DATA_ENCRYPTED +success +key_'
! stdout DATA_DECRYPTED
latticekeep audit search --limit 3 -o json
stdout -count=3 '"sequence":'
latticekeep audit search --limit 130 -o yaml
latticekeep audit search --limit 2 -o ndjson
stdout '(?s)\A\{"actor":[^\n]*\}\n\{"actor":[^\n]*\}\n\z'
stdin data
latticekeep put '=HYPERLINK(1)' k=-
latticekeep audit search --limit 1 --event CREDENTIAL_SEALED --names
stdout ' CREDENTIAL_SEALED +success +[^k ]\S+ +=HYPERLINK\(1\)$'
latticekeep audit search --limit 1 --event CREDENTIAL_SEALED -o csv --names
stdout '^sequence,timestamp,event_type,outcome,reason,actor_type,actor_id,actor_name,resource_type,resource_id,resource_name,'
stdout ',CREDENTIAL_SEALED,success,,api_key,key_[a-z2-7]+,[^,]+,credential,cred_[a-z2-7]+,''=HYPERLINK\(1\),'
latticekeep audit search --limit 1 --event CREDENTIAL_SEALED -o csv
! stdout HYPERLINK
! latticekeep audit search --names -o json
stderr 'names is for the forms table and csv'
latticekeep audit search --outcome denied --to 2020-01-01
! stdout denied
! latticekeep audit search --from yesterday
stderr '--from takes a time such as'
! latticekeep audit search --event NONE
stderr 40

latticekeep open
stdout '^http://127.0.0.1:\d+$'
! latticekeep open --url file:///etc/passwd
[exec:script] exec sh terminal.sh
[exec:script] stdout 'opened http://127.0.0.1:\d+'
`, map[string]string{
		"data": "hunter2, ünd ein Ende\n", "other": "hunter3", "binary": "\xff", "empty": "",
		"statuses.sh": `latticekeep verify --signatures signatures.json <data >/dev/null; printf "$? "
latticekeep verify --signatures signatures.json <other 2>/dev/null; printf "$? "
latticekeep verify --signatures data <other 2>/dev/null; printf "$? "
latticekeep encrypt --key none <data 2>/dev/null; echo "$? "`,
		"terminal.sh": `set -e; mkdir path; printf '#!/bin/sh\necho opened $1 >opened\n' >path/xdg-open; chmod +x path/xdg-open
PATH=$PWD/path:$PATH script -qec 'latticekeep open' /dev/null </dev/null; cat opened`,
	}, nil)
}

// What happens is printed while the command goes on, and from where somebody left off.
func TestTheAuditLogIsFollowed(t *testing.T) {
	server := start(t, t.TempDir())
	defer server.end()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	follow := func(args ...string) (*bufio.Reader, chan error) {
		cmd, ended := Command(), make(chan error, 1)
		r, w := io.Pipe()
		cmd.SetArgs(append([]string{"audit", "tail", "--url", server.BaseURL, "--api-key", server.APIKey}, args...))
		cmd.SetOut(w)
		go func() {
			err := cmd.ExecuteContext(ctx)
			w.CloseWithError(io.EOF)
			ended <- err
		}()
		return bufio.NewReader(r), ended
	}
	next := func(r *bufio.Reader) string {
		t.Helper()
		line, err := r.ReadString('\n')
		must(t, err)
		return line
	}
	text, textEnded := follow()
	if line := next(text); !strings.Contains(line, "AUDIT_READ") {
		t.Errorf("it begins with %q", line)
	}
	if status, answer := server.call("POST", "/api/v2/vault/seal", `{"name":"s","credential_type":"x","values":{"K":"v"}}`); status != 201 {
		t.Fatal(status, answer)
	}
	line := next(text)
	if !strings.Contains(line, "CREDENTIAL_SEALED") || !strings.Contains(line, "success") || !strings.Contains(line, "cred_") {
		t.Errorf("a new credential is %q", line)
	}
	lines, linesEnded := follow("--after", "1", "--json")
	var last int64 = 1
	for kind := v2.EventType(""); kind != "CREDENTIAL_SEALED"; {
		var e v2.AuditEntry
		must(t, json.Unmarshal([]byte(next(lines)), &e))
		if e.Sequence <= last {
			t.Fatalf("entry %d comes after %d", e.Sequence, last)
		}
		last, kind = e.Sequence, e.EventType
	}
	stop()
	for _, r := range []io.Reader{text, lines} { // what was already on its way
		go func() { _, _ = io.Copy(io.Discard, r) }()
	}
	for _, ended := range []chan error{textEnded, linesEnded} {
		if err := <-ended; err != nil {
			t.Errorf("an interrupted tail ends with %v", err)
		}
	}
}
