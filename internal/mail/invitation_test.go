package mail

import (
	"io"
	"mime/quotedprintable"
	"net/mail"
	"regexp"
	"strings"
	"testing"
	"unicode"
)

func invited(organisation, inviter string) string {
	m := stored{Kind: Invite, To: recipient, Token: token, Invitation: Invitation{Organisation: organisation, Inviter: inviter, Role: "member"}}
	return render("mail_x", m, Options{PublicURL: "https://vault.example.com", From: "a@b.example"}).Text
}

func TestAnInvitationNamesWhoInvitesToWhat(t *testing.T) {
	text := invited("Käsekontor Müller & Töchter", "ada.weiß@example.org")
	for _, line := range []string{"  Organisation:  Käsekontor Müller & Töchter\n", "  Invited by:    ada.weiß@example.org\n", "  Your role:     member\n"} {
		if !strings.Contains(text, line) {
			t.Errorf("%s\nlacks %q", text, line)
		}
	}
	if text := invited("Acme", ""); strings.Contains(text, "Invited by") || !strings.Contains(text, "Acme") {
		t.Errorf("an invitation by no user: %s", text)
	}
	if text := invited("", ""); strings.Contains(text, "Organisation") || strings.Contains(text, "\n\n\n") {
		t.Errorf("an invitation of an earlier release: %s", text)
	}
}

// Nothing that somebody names an organisation is a link, a line of its own or anything else than a name.
func TestNamesInAnInvitationAreInert(t *testing.T) {
	linked := regexp.MustCompile(`(?i)[a-z][a-z0-9+.-]*:[^\s]|\bwww\.\S|[^\s]@[^\s]|[\pL\pN]\.[\pL\pN]|[<>/\\\[\]"]|\p{Nd}([^\pL]*\p{Nd}){4,}`)
	hostile := []string{
		"https://evil.example/join#token=x", "evil.example", "www.evil.example", "javascript:alert(1)", "<a href=\"//evil.example\">Open</a>", "mailto:eve@evil.example",
		"[Open](https://evil.example)", "evil\u3002example", "evil\uff0eexample", "//evil.example", "a\u202eb", "x\u200b.example", "line\u2028break", "%s%d%!(EXTRA)", "eve@evil.example",
		strings.Repeat("long ", 200), strings.Repeat("w", 255), "\u0085x", "a\tb",
		"your account is locked, call +1 (888) 555-0100 now", "0800.555.0100", "8 8 8 5 5 5", "tel:+4930123456", "\u0663\u0660\u0661\u0662\u0663\u0664",
	}
	honest := strings.Count(invited("Acme", "eve@evil.example"), "\n")
	for _, name := range hostile {
		text := invited(name, "www."+name)
		_, facts, _ := strings.Cut(text, "  Organisation:  ")
		facts, _, _ = strings.Cut(facts, "\nTo accept")
		for line := range strings.Lines(facts) {
			_, value, ok := strings.Cut(line, "  Invited by:    ")
			if !ok {
				value = line
			}
			if found := linked.FindString(strings.Replace(value, "Your role:", "", 1)); found != "" {
				t.Errorf("%q: %q could become a link: %q", name, found, line)
			}
			if len([]rune(line)) > maxInert+25 {
				t.Errorf("%q: a line of %d characters", name, len([]rune(line)))
			}
		}
		if n := strings.Count(text, "\n"); n != honest {
			t.Errorf("%q: the text has %d lines, want %d", name, n, honest)
		}
		if strings.ContainsFunc(text, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }) || strings.Contains(text, "%!") {
			t.Errorf("%q: %q", name, text)
		}
		if strings.Count(text, "https://vault.example.com/join#token="+token) != 1 {
			t.Errorf("%q: the link is not there once", name)
		}
	}
	for _, address := range []string{"www.evil.example@x.example", "evil.example/join@x.example", "a{b}@x.example", strings.Repeat("w", 64) + "@" + strings.Repeat("long.", 30) + "example.org"} {
		if text := invited("Acme", address); strings.Contains(text, address) {
			t.Errorf("the address %q is in the text as it is", address)
		}
	}
}

// A server that takes seven bits gets a name with umlauts, and the link whole.
func TestAnInvitationWithUmlautsIsEncoded(t *testing.T) {
	server := startMailServer(t, STARTTLS, false)
	m := stored{Kind: Invite, To: recipient, Token: token, Invitation: Invitation{Organisation: "Käse", Role: "member"}}
	e := render("mail_x", m, Options{PublicURL: "https://vault.example.com", From: "Latticekeep <noreply@example.com>"})
	must(t, server.transport(t, STARTTLS, "", "").Send(t.Context(), e))
	raw := server.mails()[0]
	if strings.ContainsFunc(raw, func(r rune) bool { return r > unicode.MaxASCII }) {
		t.Error("the mail has more than seven bits")
	}
	got, err := mail.ReadMessage(strings.NewReader(raw))
	must(t, err)
	text, err := io.ReadAll(quotedprintable.NewReader(got.Body))
	must(t, err)
	if !strings.Contains(string(text), "Organisation:  Käse") || !strings.Contains(string(text), "/join#token="+token) {
		t.Errorf("%s", text)
	}
}
