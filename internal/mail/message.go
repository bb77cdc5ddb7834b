package mail

import (
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Kind is the subject matter of a mail.
type Kind string

// The kinds. The last three carry no token.
const (
	VerifyEmail     Kind = "verify_email"
	ResetPassword   Kind = "reset_password"
	Invite          Kind = "invite"
	PasswordChanged Kind = "password_changed"
	ApproveAPIKey   Kind = "approve_api_key"
	ExpiresSoon     Kind = "credentials_expire"
)

// Message is a mail before it is rendered. [Outbox.Run] drops a message without To. In this way a
// request about an unknown address takes the same work as one about a known address.
type Message struct {
	Kind       Kind
	To         string // address
	Token      string
	Invitation Invitation // only for Invite
}

// Invitation says who invites to what. Users wrote the first two, as anything.
type Invitation struct {
	Organisation string `json:"organisation"`
	Inviter      string `json:"inviter,omitempty"` // address; empty if no user invites
	Role         string `json:"role"`
}

// stored is the plaintext of a row.
type stored struct {
	Kind       Kind       `json:"kind"`
	To         string     `json:"to"`
	Token      string     `json:"token"`
	Invitation Invitation `json:"invitation,omitzero"` // absent in rows of earlier releases
	CreatedAt  time.Time  `json:"created_at"`
}

// template is the text of a kind of mail. It contains nothing that a user wrote; only [Invitation.facts]
// adds that.
type template struct {
	subject string
	lasts   time.Duration // how long the token is valid; an older mail is not sent
	page    string        // page of the dashboard, which reads the token from the fragment; empty for none
	path    string        // endpoint that takes the token; empty for none
	body    string        // request to the endpoint, with %s for the token
	text    string        // has %s for the link, if there is a page, and %s for the command, if there is an endpoint; both end with a newline
	facts   bool          // has %s for what is known of the invitation before them
}

// maxAge is how long delivery of a mail is retried.
const maxAge = 3 * 24 * time.Hour

// templates state the lifetimes that internal/identity gives the tokens.
var templates = map[Kind]template{
	VerifyEmail: {
		subject: "Verify your e-mail address",
		lasts:   48 * time.Hour,
		page:    "/verify",
		path:    "/api/v2/auth/verify-email",
		body:    `{"token":"%s"}`,
		text: `Somebody, most likely you, gave this e-mail address to latticekeep.
To verify that it is yours, open this page within 48 hours:

%s
Without a browser, run this command instead:

%s
If it was not you, do nothing: who verifies an account that somebody else
registered lets them act in their name.
`,
	},
	ResetPassword: {
		subject: "Reset your password",
		lasts:   time.Hour,
		page:    "/reset",
		path:    "/api/v2/auth/reset-password",
		body:    `{"token":"%s","new_password":"PUT A NEW PASSWORD HERE"}`,
		text: `Somebody, most likely you, asked for a new password of the latticekeep
account with this e-mail address. To set one, open this page within an hour:

%s
Without a browser, put a new one into this command and run it instead:

%s
All sessions of the account end then. If it was not you, do nothing: your
password stays as it is.
`,
	},
	Invite: {
		subject: "You are invited to latticekeep",
		lasts:   7 * 24 * time.Hour,
		page:    "/join",
		path:    "/api/v2/auth/accept-invitation",
		body:    `{"token":"%s","password":"PUT A NEW PASSWORD HERE"}`,
		facts:   true,
		text: `You are invited to Latticekeep, where a team keeps its passwords, keys and other
credentials, encrypted and with a log of each use.
%s
To accept, open this page within seven days:

%s
Without a browser, put a new password into this command and run it instead:

%s
If you do not expect an invitation, or do not know who invites you, do nothing:
nobody gets an account for you, and the invitation ends by itself. To be sure, ask
whoever invites you in another way than by answering this mail.
`,
	},
	PasswordChanged: {
		subject: "Your password was changed",
		lasts:   maxAge,
		path:    "/api/v2/auth/forgot-password",
		body:    `{"email":"PUT YOUR E-MAIL ADDRESS HERE"}`,
		text: `The password of the latticekeep account with this e-mail address was changed,
and its other sessions have ended.

If it was not you, ask for a new one at once with this command, and tell
whoever runs your account:

%s`,
	},
	ApproveAPIKey: {
		subject: "An API key waits for your approval",
		lasts:   maxAge,
		page:    "/settings/api-keys",
		text: `The operator of latticekeep made an API key in your tenant. It opens nothing
until an owner of the tenant approves it. You are one. This page shows what the
key may do, and who made it:

%s
Approve it there if you know what it is for. Otherwise revoke it, and ask whoever
runs latticekeep.
`,
	},
	ExpiresSoon: {
		subject: "Credentials expire soon",
		lasts:   maxAge,
		page:    "/vault",
		text: `Credentials of your tenant in latticekeep expire within 30 days, 7 days or a day.
You are an owner of the tenant. This page shows which:

%s
Programs that read them are refused then. Give them new values in time, or renew
them if the values are still good. For 28 days an expired one can be renewed; then
it is erased.
`,
	},
}

// render writes a mail. The link has the token after the #, which browsers send to no server, and
// the page waits for a press of its button. So programs that open the links of a mail do not use up
// the token.
func render(id string, m stored, o Options) Envelope {
	t, base := templates[m.Kind], strings.TrimSuffix(o.PublicURL, "/")
	body := t.body
	if strings.Contains(body, "%s") {
		body = fmt.Sprintf(body, m.Token)
	}
	var parts []any
	if t.facts {
		parts = append(parts, m.Invitation.facts())
	}
	if t.page != "" {
		fragment := ""
		if m.Token != "" {
			fragment = "#token=" + m.Token
		}
		parts = append(parts, fmt.Sprintf("  %s%s%s\n", base, t.page, fragment))
	}
	if t.path != "" {
		parts = append(parts, fmt.Sprintf("  curl -s %s%s \\\n    -H 'Content-Type: application/json' \\\n    -d '%s'\n", base, t.path, body))
	}
	return Envelope{ID: id, From: o.From, To: m.To, Subject: t.subject, Text: fmt.Sprintf(t.text, parts...), Date: m.CreatedAt}
}

// facts returns the lines about an invitation, or nothing for one of an earlier release.
func (i Invitation) facts() string {
	if i.Organisation == "" {
		return ""
	}
	lines := "\n  Organisation:  " + inert(i.Organisation) + "\n"
	if i.Inviter != "" {
		lines += "  Invited by:    " + inertAddress(i.Inviter) + "\n"
	}
	return lines + "  Your role:     " + i.Role + "\n"
}

// maxInert is how many characters of what a user wrote a mail shows.
const maxInert = 80

// plainAddress is an address that mail programs take for nothing but an address.
var plainAddress = regexp.MustCompile(`^[\pL\pN_+-][\pL\pN._+-]*@[a-z0-9.-]+$`)

func inertAddress(address string) string {
	if plainAddress.MatchString(address) && !strings.HasPrefix(address, "www.") && utf8.RuneCountInString(address) <= maxInert {
		return address
	}
	return inert(address)
}

// telephone is what mail programs take for a number to call: five digits or more, with separators between.
var telephone = regexp.MustCompile(`\p{Nd}(?:[-. ]*\p{Nd}){4,}`)

// inert returns what a user wrote as a short line of which no mail program makes a link: everything
// that has a meaning in URLs, addresses and markup becomes a space, a dot has one behind it, and telephone
// numbers are gone.
func inert(text string) string {
	var line strings.Builder
	for _, r := range text {
		switch {
		case unicode.In(r, unicode.L, unicode.M, unicode.N), strings.ContainsRune("-_'&,", r):
			line.WriteRune(r)
		case r == '.':
			line.WriteString(". ")
		default:
			line.WriteRune(' ')
		}
	}
	short := []rune(strings.Join(strings.Fields(telephone.ReplaceAllString(line.String(), "...")), " "))
	if len(short) > maxInert {
		return string(short[:maxInert]) + "..."
	}
	return string(short)
}

// Envelope is a rendered mail.
type Envelope struct {
	ID      string // id of the mail, the same at every attempt
	From    string // address, with or without a name
	To      string // address
	Subject string
	Text    string // UTF-8; ASCII but for the organisation and the inviter of an invitation
	Date    time.Time
}

// Options of [Outbox.Run]. PublicURL and From are required.
type Options struct {
	PublicURL string       // address at which users reach the service
	From      string       // address of the sender, with or without a name
	Logger    *slog.Logger // default slog.Default()
}

// ErrRefused is the cause of a failure that is permanent for this one mail.
var ErrRefused = errors.New("the recipient or the mail was refused for good")
