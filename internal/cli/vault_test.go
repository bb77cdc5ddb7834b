package cli

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Somebody stores, reads, changes and removes credentials by their names, and no value is an argument
// or in an error.
func TestTheCommandLineKeepsCredentials(t *testing.T) {
	server := start(t, t.TempDir())
	t.Cleanup(server.end)
	server.script(`
env LATTICEKEEP_URL=$BASE
stdin api-key
latticekeep login
latticekeep ls
stdout '^NAME +TYPE'
latticekeep ls -o json
stdout '^\[\]$'

# one value, without the line break that a shell adds
stdin line
latticekeep put shop/db user=- --type database --ttl-days 30
stdout 'shop/db +database +1 +active'
! stdout '\bapp\b'
latticekeep get shop/db user
stdout '^app\z'
! stderr .

# another key: --keep keeps the first, and without it all are replaced
stdin line
latticekeep put shop/db --keep password=-
stdout 'shop/db +database +2'
latticekeep get shop/db -o json
cmp stdout both.json
latticekeep get shop/db -o yaml
cmp stdout both.yaml
latticekeep get shop/db
stdout '^KEY +VALUE'
stdout '^password +app$'
stdin both.json
latticekeep put copy
latticekeep get copy -o json
cmp stdout both.json
stdin line
latticekeep put copy only=-
latticekeep get copy -o env
cmp stdout only.env

# files, and .env from a file and from standard input
latticekeep put shop/tls --type tls --from-file raw --from-file key=raw
latticekeep get shop/tls raw
cmp stdout raw
latticekeep get shop/tls key
cmp stdout raw
latticekeep put shop/env --from-env-file some.env
latticekeep get shop/env -o env
cmp stdout written.env
stdin written.env
latticekeep put shop/env --from-env-file -
latticekeep get shop/env -o env
cmp stdout written.env

# no value is an argument, and none is in an error
! latticekeep put shop/db password=hunter2
stderr 'values are no arguments'
! stderr hunter2
! latticekeep put shop/db hunter2
! stderr hunter2
stdin bad.env
! latticekeep put shop/db --from-env-file -
stderr 'standard input: line 2: it has no ='
! stderr hunter2
stdin bad.env
! latticekeep put shop/db
stderr 'not a JSON object of strings'
! stderr hunter2
stdin number.json
! latticekeep put shop/db
! stderr hunter2
! latticekeep put shop/db --from-file binary
stderr 'the value of binary is not text'
! latticekeep put shop/db --from-file none
stderr 'none: no such file'
stdin line
! latticekeep put shop/db a=- b=-
stderr 'standard input holds one value'
stdin line
! latticekeep put shop/db a=- --from-file a=raw
stderr 'the key a is given twice'
stdin line
! latticekeep put shop/db --keep --type other a=-
stderr 'shop/db is of type database'
stdin line
latticekeep put typed2 --type one a=-
stdin line
latticekeep put typed2 --type two a=-
stdout 'typed2 +two +2 '
stdin line
latticekeep put typed2 a=-
stdout 'typed2 +two +3 '

# a key that only writes does not find out by a put what is there
latticekeep apikey create writer --scope vault:write
cp stdout writer
stdin line
! latticekeep put written --type x a=- --api-key-file writer
stderr 403
stdin line
! latticekeep put shop/db --keep a=- --api-key-file writer
stderr 403
! latticekeep get shop/db --api-key-file writer
latticekeep get shop/db -o json
cmp stdout both.json

# what is not there, and how it is said
! latticekeep get shop/db pasword
stderr 'shop/db has no key pasword; it has password, user'
! latticekeep get none
stderr 'reading none: there is no such credential, or'
! latticekeep history none
stderr 'there is no credential none'
! latticekeep get shop/db -o xml
stderr '--output takes one of table, json, yaml, env'
! latticekeep get shop/db user -o json
stderr 'leave KEY out'
! latticekeep ls -o env
stderr '--output takes one of table, json, yaml;'

# lists are sorted, by prefix, and show no value
latticekeep ls shop/
stdout '(?s)shop/db .*shop/env .*shop/tls '
! stdout '\bcopy\b'
! stdout '\bapp\b'
latticekeep ls shop/d -o json
stdout '"name": "shop/db"'
! stdout 'tls'

# generated values are not shown
latticekeep generate shop/db token --length 40 --charset Hex
! stdout '[0-9a-f]{40}'
latticekeep get shop/db token
stdout '^[0-9a-f]{40}\z'
latticekeep get shop/db user
stdout '^app\z'
latticekeep generate new key --key-pair Ed25519
latticekeep get new key
stdout 'BEGIN PRIVATE KEY'
latticekeep get new key.pub
stdout 'BEGIN PUBLIC KEY'
! latticekeep generate new key --charset Klingon
stderr '--charset: give it Alphanumeric'
! latticekeep generate new key --key-pair RSA-1
stderr '--key-pair: give it Ed25519'
! latticekeep generate new 'a b'
stderr 'KEY: give it 1 to 253'

# versions
latticekeep reencrypt shop/db
stdout 'shop/db +database +4'
latticekeep history shop/db
stdout '(?s)^4 +reencrypted .* current\n3 +rotated[^\n]* erased\n.*1 +sealed'
latticekeep history shop/db -o yaml
stdout 'change: reencrypted'

# earlier versions, where somebody asks for them
! latticekeep undo shop/db
stderr 'no earlier version of shop/db is kept: latticekeep keep says'
latticekeep keep 'shop/**' 2
stdout 'shop/\*\* +2'
stdin line
latticekeep put shop/db --keep user=-
stdin both.json
latticekeep put shop/old --type database
stdin line
latticekeep put shop/old other=-
latticekeep history shop/old
stdout '(?s)^2 [^\n]* current\n1 [^\n]* kept'
latticekeep history shop/old --diff 1
cmp stdout difference
latticekeep history shop/old --diff 1 -o json
stdout '"removed": \['
latticekeep get shop/old --version 1 -o json
cmp stdout both.json
! latticekeep get shop/db --version 1
stderr 'reading version 1 of shop/db: it is not kept'
latticekeep undo shop/old
stdout 'shop/old +database +3'
latticekeep get shop/old -o json
cmp stdout both.json
latticekeep undo shop/old --version 2
latticekeep get shop/old other
! latticekeep undo shop/old --version 9
stderr 'bringing version 9 of shop/old back: .*version 9 is not kept'
latticekeep keep 'shop/old' 0
latticekeep keep
stdout '(?s)shop/\*\* +2\nshop/old +0'
! latticekeep get shop/old --version 3
latticekeep keep --remove shop/old
! stdout shop/old
latticekeep keep shop/old 0
latticekeep keep 'shop/**'
stdout '^shop/\*\* +2$'
! stdout shop/old
latticekeep keep --remove shop/old
! latticekeep keep shop/old
stderr 'there is no rule of the path shop/old: latticekeep keep prints all'
! latticekeep keep --remove 'shop/**' 2
stderr '--remove takes PATH and no N'
! latticekeep keep --remove
stderr '--remove takes PATH and no N'
! latticekeep keep 'shop/**' many
stderr 'N is "many"'
! latticekeep keep 'sh*p' 1
stderr 'path has "\*" only as a whole segment'
latticekeep keep --remove 'shop/**'
latticekeep rm shop/old --purge --yes

# without an end, where a setting allows it
stdin line
! latticekeep put ci/key k=- --never-expires
stderr 'never_expires_paths'
latticekeep settings --never-expires 'ci/**'
stdout 'never-expires +ci/\*\*'
stdin line
latticekeep put ci/key k=- --never-expires
stdout 'ci/key .* never '
latticekeep history ci/key
stdout 'never +current'
stdin line
! latticekeep put ci/key k=- --never-expires --ttl-days 3
stderr 'exclude each other'
latticekeep renew ci/key --ttl-days 3
! stdout '\bnever\b'
latticekeep renew ci/key --never-expires
stdout never
! latticekeep settings --must-expire 'ci/*'
stderr 'no setting has this path'
latticekeep settings --must-expire 'ci/**' -o json
stdout '"never_expires_paths": \[\]'
latticekeep settings
stdout '^names-kept-days +400$'
latticekeep settings --names-kept-days 30
stdout '^names-kept-days +30$'
! latticekeep settings --names-kept-days 4000
stderr 'from 0 to 3650'
! latticekeep renew ci/key --never-expires
latticekeep rm ci/key --purge --yes

# another name
latticekeep mv new moved/key
stdout 'moved/key +\S+ +2 '
! latticekeep get new key
latticekeep get moved/key key.pub
! latticekeep mv moved/key shop/db
stderr 'renaming moved/key: .*another credential has this name'
! latticekeep mv moved/key a//b
stderr 'name must be a path'

# what a credential is for
latticekeep describe moved/key --description 'Opens the shop.' --contact ops@example.org --tag pci --tag shop
stdout '(?s)^FIELD +VALUE\nname +moved/key\n.*description +Opens the shop.\ncontact +ops@example.org\ntags +pci shop\n$'
latticekeep describe moved/key --clear contact --untag shop --tag new -o json
stdout '"tags": \[\n +"new",\n +"pci"\n'
! stdout contact
latticekeep describe moved/key
stdout '(?s)description +Opens the shop.\ntags +new pci\n$'
! latticekeep describe moved/key --tag 'a b'
stderr 'describing moved/key: .*tags: a tag must have 1 to 64 visible characters'
! latticekeep describe moved/key --clear name
stderr '--clear must be description, contact or tags'
! latticekeep describe nothing --tag a
stderr 'there is no credential nothing'
latticekeep ls --tag pci
stdout '(?s)^NAME.*\nmoved/key [^\n]*\n$'
latticekeep ls --tag none
! stdout moved/key

# a shell completes names
latticekeep __complete get shop/d
stdout '^shop/db$'
! stdout 'shop/tls|copy'
latticekeep __complete run --env-from shop/t
stdout '^shop/tls$'
latticekeep __complete get shop/db ''
! stdout '\bshop\b'
latticekeep __complete get --profile none shop/d
! stdout '\bshop\b'
stdin line
latticekeep put 'shop/$(odd)' a=-
latticekeep __complete history shop/
stdout '^shop/db$'
! stdout '\bodd\b'

# the trash gives back what it took; its name is free, and --purge means it
latticekeep rm shop/tls
stdout '^shop/tls is in the trash: until 20\S+, latticekeep renew cred_\w+ brings it back$'
! latticekeep get shop/tls raw
latticekeep ls
! stdout shop/tls
latticekeep ls --trash
stdout 'shop/tls +tls +2 +trash'
! stdout shop/db
! latticekeep rm shop/tls
stderr 'shop/tls is in the trash: latticekeep renew cred_\w+ brings it back, and latticekeep rm --purge deletes it'
! latticekeep history shop/tls
stderr 'is in the trash'
latticekeep renew shop/tls --ttl-days 9
stdout 'shop/tls +tls +3 +active'
latticekeep get shop/tls raw
cmp stdout raw
latticekeep rm shop/tls
stdin line
latticekeep put shop/tls --keep other=-
stdout 'shop/tls +tls +1 +active'
latticekeep rm shop/tls --purge --yes
latticekeep renew shop/tls
stdout 'shop/tls +tls +5 +active'
! latticekeep rm shop/tls --purge
stderr 'give --yes'
ttyin -stdin no
! latticekeep rm shop/tls --purge
stderr 'Type shop/tls to delete it'
stderr 'not confirmed: nothing was done'
latticekeep get shop/tls raw
ttyin -stdin yes
latticekeep rm shop/tls --purge
stdout 'shop/tls \(cred_\w+\) deleted'
! latticekeep get shop/tls raw
! latticekeep renew shop/tls
stderr 'there is no credential shop/tls'
latticekeep rm copy
latticekeep rm copy --purge --yes
latticekeep ls --trash
! stdout '\bcopy\b'
! latticekeep get copy

# in a terminal the value is asked for
ttyin -stdin line
latticekeep put typed word=-
stderr 'Value of word: '
latticekeep get typed word
stdout '^app\z'
ttyin -stdin line
! latticekeep put typed
stderr 'no values: give KEY=-'

# two of one name are told apart by their ids
exec curl -sf $BASE/api/v2/vault/seal -H 'X-API-Key: '$API_KEY -H 'Content-Type: application/json' -d '{"name":"twin","credential_type":"x","values":{"n":"one"}}'
exec curl -sf $BASE/api/v2/vault/seal -H 'X-API-Key: '$API_KEY -H 'Content-Type: application/json' -d '{"name":"twin","credential_type":"x","values":{"n":"two"}}'
latticekeep get twin n
stdout two
stdin line
! latticekeep put twin n=-
stderr '2 credentials have the name twin: give the id of one of them, cred_\w+ \(expires 20\S+ \S+\), cred_'
latticekeep ls twin -o json
exec sh ids.sh
latticekeep ls --sort updated
stdout '^NAME .*\n(.*\n)+shop/db .*\n(.*\n)*shop/env '
! latticekeep ls --sort size
stderr '--sort must be name, created, updated, expires, last_read or unread'
latticekeep ls --sort last_read
stdout '^NAME +TYPE +VERSION +STATUS +READ .*\n(.*\n)*twin .* 20\S+ \d\dh (.*\n)+twin .* never '
latticekeep ls --sort unread
stdout '^NAME +TYPE +VERSION +STATUS +READ .*\n(.*\n)*twin .* never '
exec sh rest.sh
stdout 'app$'
`, map[string]string{
		"line": "app\n", "difference": "+ other\n- password\n- user\n", "both.json": "{\n  \"password\": \"app\",\n  \"user\": \"app\"\n}\n", "both.yaml": "password: app\nuser: app\n",
		"only.env": "only=app\n", "raw": "-----\nraw\n", "some.env": "# c\nexport A='x y'\nB=\"1\n2\"\n", "written.env": "A='x y'\nB='1\n2'\n",
		"bad.env": "A=1\nhunter2\n", "number.json": `{"a": hunter2}`, "binary": "\xff\xfe", "no": "shop/db\n", "yes": "shop/tls\n",
		"ids.sh":  `latticekeep ls twin -o json | grep -o 'cred_[a-z2-7]*' >ids`,
		"rest.sh": `set -e; one=$(head -1 ids); two=$(tail -1 ids); echo app | latticekeep put $one n=-; latticekeep rm $two; latticekeep get twin n`,
	}, nil)
}

// Pages of the list are read to the last, also when some are short.
func TestAListIsReadToItsEnd(t *testing.T) {
	server := start(t, t.TempDir())
	defer server.end()
	for range 205 {
		if status, answer := server.call("POST", "/api/v2/vault/seal", `{"name":"many","credential_type":"x","values":{"k":"v"}}`); status != 201 {
			t.Fatal(status, answer)
		}
	}
	printed, err := run(t, "ls", "m", "--url", server.BaseURL, "--api-key", server.APIKey)
	if err != nil || strings.Count(printed, "many ") != 205 {
		t.Errorf("%d of 205 credentials are listed, %v", strings.Count(printed, "many "), err)
	}
	// So are those of the audit log, for programs.
	for form, more := range map[string]int{"ndjson": 0, "csv": 1} {
		printed, err := run(t, "audit", "search", "--event", "CREDENTIAL_SEALED", "-o", form, "--url", server.BaseURL, "--api-key", server.APIKey)
		if n := strings.Count(printed, "\n"); err != nil || n != 205+more || strings.Count(printed, "sequence,") != more {
			t.Errorf("%s: %d lines of 205 entries, %v", form, n, err)
		}
		printed, err = run(t, "audit", "search", "--event", "CREDENTIAL_SEALED", "-o", form, "--limit", "101", "--url", server.BaseURL, "--api-key", server.APIKey)
		if n := strings.Count(printed, "\n"); err != nil || n != 101+more {
			t.Errorf("%s: %d lines of 101 entries, %v", form, n, err)
		}
	}
}

// A program gets the values of credentials in its environment. It is the process that its caller knows:
// it gets the signals, and its status is seen.
func TestAProgramRunsWithCredentials(t *testing.T) {
	server := start(t, t.TempDir())
	t.Cleanup(server.end)
	server.script(`
env LATTICEKEEP_URL=$BASE
stdin api-key
latticekeep login
stdin first.env
latticekeep env push first
stdin second.env
latticekeep env push second

env BOTH=mine KEPT=kept
latticekeep run --env-from first -- env
stdout '^A=x y$'
stdout '^BOTH=first$'
! stdout '^BOTH=mine$'
stdout '^KEPT=kept$'
! stderr .
latticekeep run --env-from first --env-from second -- sh -c 'printf "%s|" "$A" "$B" "$BOTH"'
stdout '^x y\|1\n2\|second\|$'
stdin second.env
latticekeep run --env-from first cat --help
exec sh status.sh
stdout '^7$'
exec sh key.sh
! stdout .

! latticekeep run --env-from none -- env
stderr 'reading none'
! stdout .
! latticekeep run --env-from first --env-from none -- env
! stdout .
! latticekeep run --env-from first -- no-such-program hunter2
stderr 'there is no program no-such-program'
! stderr hunter2
! latticekeep run -- env
stderr '--env-from is needed'
! latticekeep run --env-from first
stderr 'latticekeep run needs'
stdin zero.json
latticekeep put zero
! latticekeep run --env-from zero -- env
stderr 'the value of z in zero has a zero byte'
! stderr hunter
stdin line
latticekeep put preload LD_PRELOAD=-
! latticekeep run --env-from preload -- env
stderr 'LD_PRELOAD in preload would change which code'
! latticekeep env pull zero
stderr 'the value of z is not text'
! stderr hunter

latticekeep env pull first
cmp stdout first.env
stdin bad.env
! latticekeep env push first
stderr 'standard input: line 3: the quote that its value begins with does not end'
! stderr hunter
ttyin -stdin bad.env
! latticekeep env push first
stderr 'standard input is a terminal'
stdin second.env
latticekeep env push first --keep
latticekeep env pull first
stdout '^A=.x y.$'
stdin second.env
latticekeep env push first
latticekeep env pull first
cmp stdout second.env
`, map[string]string{
		"first.env": "A='x y'\nBOTH=first\n", "second.env": "B='1\n2'\nBOTH=second\n", "bad.env": "A=1\n\nB='hunter2\n", "zero.json": `{"z": "hunter\u0000"}`,
		"line": "hunter2\n", "key.sh": "LATTICEKEEP_API_KEY=$(cat api-key) latticekeep run --env-from first -- env | grep LATTICEKEEP_API_KEY || true",
		"status.sh": "latticekeep run --env-from first -- sh -c 'exit 7'; echo $?",
	}, nil)
}

// A signal that is sent to latticekeep reaches the program that it runs.
func TestSignalsReachTheProgram(t *testing.T) {
	server := start(t, t.TempDir())
	defer server.end()
	if status, answer := server.call("POST", "/api/v2/vault/seal", `{"name":"s","credential_type":"x","values":{"K":"v"}}`); status != 201 {
		t.Fatal(status, answer)
	}
	program, err := os.Executable()
	must(t, err)
	link := filepath.Join(t.TempDir(), "latticekeep")
	must(t, os.Symlink(program, link))
	cmd := exec.CommandContext(t.Context(), link, "run", "--env-from", "s", "--", "sh", "-c", `echo "$K"; exec cat`)
	cmd.Env = append(os.Environ(), "LATTICEKEEP_URL="+server.BaseURL, "LATTICEKEEP_API_KEY="+server.APIKey)
	_, err = cmd.StdinPipe() // stays open, so that cat goes on
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "v\n" {
		t.Fatalf("the program says %q, %v", line, err)
	}
	must(t, cmd.Process.Signal(syscall.SIGUSR1))
	var ended *exec.ExitError
	if err := cmd.Wait(); !errors.As(err, &ended) || ended.Sys().(syscall.WaitStatus).Signal() != syscall.SIGUSR1 {
		t.Errorf("it ended with %v, want the signal", err)
	}
}

// An editor changes, adds and removes values, and what somebody else stored meanwhile is not lost. The
// text is in memory, for its user only, and gone afterwards.
func TestACredentialIsEdited(t *testing.T) {
	server := start(t, t.TempDir())
	t.Cleanup(server.end)
	server.script(`
env LATTICEKEEP_URL=$BASE
stdin api-key
latticekeep login
stdin first.json
latticekeep put shop/db
! latticekeep edit shop/db
stderr 'no editor: set EDITOR'

env EDITOR='sh change.sh'
latticekeep edit shop/db
stdout 'shop/db +generic +2 '
! stdout hunter
latticekeep get shop/db -o json
cmp stdout second.json
exec sh gone.sh

env EDITOR=true
latticekeep edit shop/db
stderr 'nothing changed'
env EDITOR=false
! latticekeep edit shop/db
stderr 'running the editor, so nothing is stored'
env EDITOR='sh broken.sh'
! latticekeep edit shop/db
stderr 'the text is not YAML of KEY: VALUE: look at'
! stderr hunter
env EDITOR='sh number.sh'
! latticekeep edit shop/db
stderr 'the value of port is not text: put it into quotes'
! stderr 5432
env EDITOR='sh empty.sh'
! latticekeep edit shop/db
stderr 'no value is left: latticekeep rm'
latticekeep get shop/db -o json
cmp stdout second.json

# what somebody else stores meanwhile stays
env EDITOR='sh other.sh'
latticekeep edit shop/db
stdout 'shop/db +generic +4 '
latticekeep get shop/db -o json
stdout '(?s)"theirs": "theirs",\n  "user": "mine"'
env EDITOR='sh meanwhile.sh'
! latticekeep edit shop/db
stderr 'somebody else has changed user of shop/db meanwhile'
! stderr 'theirs|ours'
latticekeep get shop/db user
stdout '^theirs-'
ttyin -stdin again
latticekeep edit shop/db
stderr 'Type again to go on editing'
latticekeep get shop/db -o json
stdout '(?s)"number": "008",.*"theirs": "theirs",\n  "user": "ours"'
! stdout '\bmore\b'
cmp conflict conflict.yaml

# what the server refuses is still there when the editor opens again
env EDITOR='sh refused.sh'
ttyin -stdin again
latticekeep edit shop/db
latticekeep get shop/db good
stdout '^hunter2\z'
exec rm -f refused
! latticekeep edit shop/db
stderr 'storing shop/db: '
! stderr hunter
! latticekeep edit none
stderr 'reading none'
`, map[string]string{
		"first.json":  `{"user": "app", "gone": "hunter2", "lines": "a\nb\n", "number": "007"}`,
		"second.json": "{\n  \"lines\": \"a\\nb\\n\",\n  \"more\": \"x: y\",\n  \"number\": \"007\",\n  \"user\": \"ada\"\n}\n",
		"change.sh": `set -e; echo $1 >where; test "$(stat -c %a $1)" = 600; test "$(stat -f -c %T $1)" = tmpfs
sed -i 's/^user: app/user: ada/; /^gone:/d' "$1"; echo 'more: "x: y"' >>"$1"`,
		"gone.sh":   `! test -e $(cat where) && ! test -e $(dirname $(cat where))`,
		"broken.sh": `echo 'user: [hunter2' >"$1"`,
		"number.sh": `echo 'port: 5432' >"$1"`,
		"empty.sh":  `>"$1"`,
		"other.sh":  `printf theirs | latticekeep put shop/db --keep theirs=- && sed -i 's/^user: .*/user: mine/' "$1"`,
		"again":     "again\n",
		"meanwhile.sh": `set -e; if test -e edited; then sed s/theirs-.*/theirs-/ "$1" >conflict; sed -i '/^=======/,/^>>>>>>>/d; /^<<<<<<</d; /^more:/d' "$1"; exit; fi
test ! -t 0 || touch edited
printf theirs-$$ | latticekeep put shop/db --keep user=-
printf 008 | latticekeep put shop/db --keep number=-
sed -i 's/^user: .*/user: ours/' "$1"`,
		"conflict.yaml": `# Somebody else has changed this credential meanwhile. Between marks, leave the lines
# of one side, and remove the marks.
lines: |
  a
  b
more: 'x: y'
number: "008"
theirs: theirs
<<<<<<< yours
user: ours
=======
user: theirs-
>>>>>>> theirs
`,
		"refused.sh": `set -e; if test -e refused; then grep -q '^a b: hunter2$' "$1"; sed -i 's/^a b:/good:/' "$1"; exit; fi
echo >refused; echo 'a b: hunter2' >>"$1"`,
	}, nil)
}

// A key that may not list a path does not find what is there, and put --keep ends and says so.
func TestAKeepThatFindsNothingEnds(t *testing.T) {
	server := start(t, t.TempDir())
	defer server.end()
	made := func(method, path, body string) map[string]any {
		t.Helper()
		status, answer := server.call(method, path, body)
		if status >= 300 {
			t.Fatal(status, answer)
		}
		return answer
	}
	made("POST", "/api/v2/vault/seal", `{"name":"shop/db","credential_type":"x","values":{"k":"v"}}`)
	key := made("POST", "/api/v2/api-keys", `{"name":"n","scopes":["vault:read","vault:write"]}`)
	policy := made("POST", "/api/v2/access/policies", `{"name":"p","rules":[{"path":"shop/**","verbs":["read","write"]}]}`)
	made("PUT", "/api/v2/access/bindings/"+key["key_id"].(string), fmt.Sprintf(`{"policies":[%q]}`, policy["policy"].(map[string]any)["policy_id"]))
	file := filepath.Join(t.TempDir(), "value")
	must(t, os.WriteFile(file, []byte("v"), 0o600))
	_, err := run(t, "put", "shop/db", "--keep", "--from-file", "new="+file, "--url", server.BaseURL, "--api-key", key["api_key"].(string))
	if err == nil || !strings.Contains(err.Error(), "needs the verb list on its path") {
		t.Error(err)
	}
}

// Two commands that each add a key to a credential that is not there yet lose none.
func TestKeepsAtTheSameTimeLoseNoKey(t *testing.T) {
	server := start(t, t.TempDir())
	t.Cleanup(server.end)
	server.script(`
env LATTICEKEEP_URL=$BASE
stdin api-key
latticekeep login
exec sh keep.sh
latticekeep get shop/db -o env
cmp stdout all.env
`, map[string]string{
		"keep.sh": `set -e; for n in 1 2 3 4 5; do { printf v | latticekeep put shop/db --keep k$n=- >out$n 2>&1 || touch failed; } & done; wait
if test -e failed; then cat out*; exit 1; fi`,
		"all.env": "k1=v\nk2=v\nk3=v\nk4=v\nk5=v\n",
	}, nil)
}
