package mail

import (
	"fmt"
	"strings"
	"time"
)

// template is the text of a kind of mail. Neither part holds anything that a
// user wrote.
type template struct {
	subject string
	lasts   time.Duration // how long the token counts; a mail that is older is not worth sending
	path    string        // of the endpoint that takes the token
	body    string        // the request to it, with %s for the token
	text    string        // with %s for the command, which ends with a newline
}

// templates name the times that internal/identity gives the tokens.
var templates = map[Kind]template{
	VerifyEmail: {
		subject: "Verify your e-mail address",
		lasts:   48 * time.Hour,
		path:    "/api/v2/auth/verify-email",
		body:    `{"token":"%s"}`,
		text: `Somebody, most likely you, gave this e-mail address to latticekeep.
To verify that it is yours, run this command within 48 hours:

%s
If it was not you, do nothing: who verifies an account that somebody else
registered lets them act in their name.
`,
	},
	ResetPassword: {
		subject: "Reset your password",
		lasts:   time.Hour,
		path:    "/api/v2/auth/reset-password",
		body:    `{"token":"%s","new_password":"PUT A NEW PASSWORD HERE"}`,
		text: `Somebody, most likely you, asked for a new password of the latticekeep
account with this e-mail address. To set one, put it into this command and
run it within an hour:

%s
All sessions of the account end then. If it was not you, do nothing: your
password stays as it is.
`,
	},
	Invite: {
		subject: "You are invited to latticekeep",
		lasts:   7 * 24 * time.Hour,
		path:    "/api/v2/auth/accept-invitation",
		body:    `{"token":"%s","password":"PUT A NEW PASSWORD HERE"}`,
		text: `You are invited to an account of latticekeep. To accept, put a new password
into this command and run it within seven days:

%s
If you expect no invitation, do nothing.
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
}

// render writes a mail.
func render(id string, m stored, o Options) Envelope {
	t := templates[m.Kind]
	body := t.body
	if strings.Contains(body, "%s") {
		body = fmt.Sprintf(body, m.Token)
	}
	command := fmt.Sprintf("  curl -s %s%s \\\n    -H 'Content-Type: application/json' \\\n    -d '%s'\n",
		strings.TrimSuffix(o.PublicURL, "/"), t.path, body)
	return Envelope{ID: id, From: o.From, To: m.To, Subject: t.subject, Text: fmt.Sprintf(t.text, command), Date: m.CreatedAt}
}
