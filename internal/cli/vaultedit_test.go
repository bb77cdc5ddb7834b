package cli

import (
	"bufio"
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// editing is latticekeep edit as a process of its own, whose editor has opened the text.
type editing struct {
	*exec.Cmd
	text string // file that is edited
}

func startEdit(t *testing.T, server *running) *editing {
	t.Helper()
	program, err := os.Executable()
	must(t, err)
	dir := t.TempDir()
	link := filepath.Join(dir, "latticekeep")
	must(t, os.Symlink(program, link))
	script := filepath.Join(dir, "editor.sh")
	must(t, os.WriteFile(script, []byte("echo $1; exec cat\n"), 0o600))
	e := &editing{Cmd: exec.CommandContext(t.Context(), link, "edit", "s")}
	e.Env = append(os.Environ(), "LATTICEKEEP_URL="+server.BaseURL, "LATTICEKEEP_API_KEY="+server.APIKey, "VISUAL=", "EDITOR=sh "+script)
	// A pipe that stays open, and no other process to copy it, so that cat goes on as an editor does.
	in, _, err := os.Pipe()
	must(t, err)
	e.Stdin = in
	out, err := e.StdoutPipe()
	must(t, err)
	must(t, e.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	must(t, err)
	e.text = strings.TrimSuffix(line, "\n")
	if text := readText(t, e.text); text != "K: hunter2\n" {
		t.Fatalf("the text is %q", text)
	}
	return e
}

// However an edit is ended, its text goes: at once, or after a kill with the next edit, which leaves the
// texts of others.
func TestAnEditThatIsEndedLeavesNoText(t *testing.T) {
	server := start(t, t.TempDir())
	defer server.end()
	if status, answer := server.call("POST", "/api/v2/vault/seal", `{"name":"s","credential_type":"x","values":{"K":"hunter2"}}`); status != http.StatusCreated {
		t.Fatal(status, answer)
	}
	for _, signal := range []syscall.Signal{syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGTERM} {
		e := startEdit(t, server)
		must(t, e.Process.Signal(signal))
		var ended *exec.ExitError
		if err := e.Wait(); !errors.As(err, &ended) || ended.ExitCode() != 1 {
			t.Errorf("%s: ended with %v, want status 1", signal, err)
		}
		if exists(filepath.Dir(e.text)) {
			t.Errorf("%s: the text is still there", signal)
			os.RemoveAll(filepath.Dir(e.text))
		}
	}

	other := startEdit(t, server)
	killed := startEdit(t, server)
	must(t, killed.Process.Kill())
	_ = killed.Wait()
	if !exists(killed.text) {
		t.Error("a killed process has removed its text")
	}
	t.Setenv("VISUAL", "true")
	if out, err := run(t, "edit", "s", "--url", server.BaseURL, "--api-key", server.APIKey); err != nil {
		t.Error(out, err)
	}
	if exists(filepath.Dir(killed.text)) {
		t.Error("the next edit leaves the text of a killed process")
		os.RemoveAll(filepath.Dir(killed.text))
	}
	if !exists(other.text) {
		t.Error("the next edit removes a text that is being edited")
	}
	// Ctrl-C is the editor's, however often it is typed.
	for range 3 {
		must(t, other.Process.Signal(os.Interrupt))
	}
	must(t, other.Process.Signal(syscall.SIGTERM))
	if err := other.Wait(); err == nil || exists(filepath.Dir(other.text)) {
		t.Error(err, "after Ctrl-C the text is still there")
		os.RemoveAll(filepath.Dir(other.text))
	}
}

// A value that YAML would change is refused before an editor opens, and so is one that comes meanwhile.
func TestAValueThatYAMLChangesIsNotEdited(t *testing.T) {
	server := start(t, t.TempDir())
	t.Cleanup(server.end)
	server.script(`
env LATTICEKEEP_URL=$BASE
stdin api-key
latticekeep login
env EDITOR='touch opened'
stdin next-line
latticekeep put s
! latticekeep edit s
stderr 'the value of line cannot be edited as text: get it to a file and put it'
stdin delete
latticekeep put s
! latticekeep edit s
stderr 'the value of erased cannot be edited as text'
stdin no-character
latticekeep put s
! latticekeep edit s
stderr 'the value of none cannot be edited as text'
! stderr hunter
! exists opened

stdin plain
latticekeep put s
env EDITOR='sh meanwhile.sh'
ttyin -stdin again
! latticekeep edit s
stderr 'the value of erased cannot be edited as text'
latticekeep get s -o json
cmp stdout after
`, map[string]string{
		"next-line": `{"a": "b", "line": "hunter2\u0085"}`, "delete": `{"a": "b", "erased": "hunter2\u007f"}`, "no-character": `{"a": "b", "none": "hunter2\ufffe"}`,
		"plain": `{"user": "app"}`, "again": "again\n", "after": "{\n  \"erased\": \"x\u007f\",\n  \"user\": \"theirs\"\n}\n", "theirs": `{"user": "theirs", "erased": "x\u007f"}`,
		"meanwhile.sh": `set -e; latticekeep put s <theirs; sed -i 's/^user: .*/user: ours/' "$1"`,
	}, nil)
}
