package cli

import (
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
)

// What stands in a transcript for ids, times, numbers of entries and the folder of settings.
var (
	anyID       = regexp.MustCompile(`\b(cred|key|pol)_[a-z2-7]{26}\b`)
	anyDay      = regexp.MustCompile(`\b20\d\d-\d\d-\d\d\b`)
	anyClock    = regexp.MustCompile(`\b\d\d:\d\d:\d\d\b`)
	anySequence = regexp.MustCompile(`(?m)^\d+ +20`)
	anySettings = regexp.MustCompile(`/\S+/settings/`)
)

const (
	sampleID     = "_mfrggzdfmztwq2lknnwg23tpoa"
	sampleServer = "http://127.0.0.1:8200"

	mostCommands = 10 // that a newcomer needs
)

// The transcript of docs/get-started/team.md is what its commands print. TRANSCRIPT=update writes it.
func TestTheTranscriptOfATeam(t *testing.T) {
	const page, fence = "../../docs/get-started/team.md", "```console\n"
	text, err := os.ReadFile(page)
	must(t, err)
	head, rest, found := strings.Cut(string(text), fence)
	transcript, tail, ended := strings.Cut(rest, "```\n")
	if !found || !ended {
		t.Fatalf("%s has no transcript", page)
	}
	// run prints a command and what it prints. Where the command has the sample of a key's id, the key that
	// was made last takes its place.
	script := "PATH=$PWD/bin:$PATH\nrun() { echo \"$ $1\"; eval \"${1//key" + sampleID + "/${key-}}\" 2>&1 | tee printed; key=$(grep -o 'key_[a-z2-7]*' printed || echo \"${key-}\"); }\n"
	commands := 0
	for line := range strings.Lines(transcript) {
		if command, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "$ "); ok {
			commands++
			script += "run '" + strings.ReplaceAll(command, "'", `'\''`) + "'\n"
		}
	}
	if commands > mostCommands {
		t.Errorf("%d commands, at most %d", commands, mostCommands)
	}
	printed := printedOnOneDay(t, script)
	switch {
	case printed == transcript:
	case os.Getenv("TRANSCRIPT") == "update":
		must(t, os.WriteFile(page, []byte(head+fence+printed+"```\n"+tail), 0o644))
	default:
		t.Errorf("the commands print\n%s\nand the page has\n%s", printed, transcript)
	}
}

// printedOnOneDay returns what a script prints on a new server, with samples for what is never the same.
func printedOnOneDay(t *testing.T, script string) string {
	t.Helper()
	today := func() time.Time { return time.Now().UTC().Truncate(24 * time.Hour) }
	day, printed := today(), ""
	for first := true; first || !day.Equal(today()); first = false { // a day that began meanwhile has other times
		day = today()
		server := start(t, t.TempDir())
		printed = server.paste(strings.ReplaceAll(script, sampleServer, server.BaseURL))
		printed = strings.ReplaceAll(printed, server.BaseURL, sampleServer)
		server.end()
	}
	sampleDay := time.Date(2026, 11, 26, 0, 0, 0, 0, time.UTC)
	printed = anySequence.ReplaceAllString(printed, "42        20")
	printed = anyDay.ReplaceAllStringFunc(printed, func(text string) string {
		at, err := time.Parse(time.DateOnly, text)
		must(t, err)
		return sampleDay.Add(at.Sub(day)).Format(time.DateOnly)
	})
	printed = anyClock.ReplaceAllString(printed, "10:00:00")
	printed = anySettings.ReplaceAllString(printed, "~/.config/")
	return anyID.ReplaceAllString(printed, "${1}"+sampleID)
}
