package mail

import (
	"bufio"
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/emersion/go-smtp"
)

func TestAMailArrivesOverEveryKindOfConnection(t *testing.T) {
	for _, security := range []Security{STARTTLS, TLS, Plain} {
		for name, authenticated := range map[string]bool{"anonymous": false, "signed in": true} {
			t.Run(string(security)+" "+name, func(t *testing.T) {
				f := newFixture(t)
				server := startMailServer(t, security, authenticated)
				user, pass := "", ""
				if authenticated {
					user, pass = username, password
				}
				id := f.post(Message{Kind: VerifyEmail, To: recipient, Token: token})
				f.pass(f.courier(server.transport(t, security, user, pass)))
				mails := server.mails()
				if len(mails) != 1 || f.stored() != 0 || f.log.String() != "" {
					t.Fatal(mails, f.stored(), f.log)
				}
				for _, want := range []string{
					"From: \"Latticekeep\" <noreply@example.com>\r\n", "To: <" + recipient + ">\r\n", "Message-ID: <" + id + "@example.com>\r\n",
					"Date: Sat, 21 Nov 2026 12:00:00 +0000\r\n", "Auto-Submitted: auto-generated\r\n", "Subject: Verify your e-mail address\r\n",
					`-d '{"token":"` + token + `"}'` + "\r\n", "https://vault.example.com/api/v2/auth/verify-email",
					"\r\n  https://vault.example.com/verify#token=" + token + "\r\n",
				} {
					if !strings.Contains(mails[0], want) {
						t.Errorf("%s\nlacks %q", mails[0], want)
					}
				}
			})
		}
	}
}

func TestARefusalIsForGoodOrNot(t *testing.T) {
	answer := func(code int) func() error {
		return func() error {
			return &smtp.SMTPError{Code: code, EnhancedCode: smtp.EnhancedCode{code / 100, 1, 1}, Message: "no: " + recipient}
		}
	}
	for name, c := range map[string]struct {
		rcpt, data func() error
		forGood    bool
	}{
		"an unknown recipient":         {rcpt: answer(550), forGood: true},
		"a recipient not now":          {rcpt: answer(451)},
		"a sender that must sign in":   {rcpt: answer(530)},
		"a text that is refused":       {data: answer(554), forGood: true},
		"a text that is taken later":   {data: answer(452)},
		"a server that is shut down":   {rcpt: answer(421)},
		"a mailbox that is full today": {rcpt: answer(452)},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			server := startMailServer(t, STARTTLS, false)
			server.rcpt = c.rcpt
			if c.data != nil {
				server.data = func(*smtp.Conn) error { return c.data() }
			}
			id := f.post(Message{Kind: Invite, To: recipient, Token: token})
			courier := f.courier(server.transport(t, STARTTLS, "", ""))
			f.pass(courier)
			if left := f.stored(); (left == 0) != c.forGood {
				t.Fatalf("%d are left: %s", left, f.log)
			}
			if log := f.log.String(); !strings.Contains(log, id) || strings.Contains(log, "canary") || strings.Contains(log, "giving up") != c.forGood {
				t.Error(log)
			}
			server.rcpt, server.data = nil, nil
			f.advance(firstRetry)
			f.pass(courier)
			if mails := server.mails(); (len(mails) == 0) != c.forGood || f.stored() != 0 {
				t.Error("the second try:", len(mails), f.stored(), f.log)
			}
		})
	}
}

func TestTroubleWithTheServerKeepsTheMail(t *testing.T) {
	plain := func(t *testing.T) *mailServer { return startMailServer(t, Plain, false) }
	cases := map[string]struct {
		server     func(t *testing.T) *mailServer
		security   Security
		user, pass string
		says       string
	}{
		"a wrong password":            {func(t *testing.T) *mailServer { return startMailServer(t, STARTTLS, true) }, STARTTLS, username, "canary-wrong", "535"},
		"no sign-in where one is due": {func(t *testing.T) *mailServer { return startMailServer(t, STARTTLS, true) }, STARTTLS, "", "", "502"},
		"no STARTTLS":                 {plain, STARTTLS, "", "", "does not offer"},
		"no TLS":                      {plain, TLS, "", "", "first record"},
		"an unknown certificate": {func(t *testing.T) *mailServer {
			m := startMailServer(t, STARTTLS, false)
			m.roots = nil
			return m
		}, STARTTLS, "", "", "certificate"},
		"nobody there": {func(t *testing.T) *mailServer {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			must(t, err)
			must(t, l.Close())
			return &mailServer{address: l.Addr().String()}
		}, STARTTLS, "", "", "refused"},
		"a server that hangs up": {func(t *testing.T) *mailServer {
			return &mailServer{address: speak(t, func(conn net.Conn) { _ = conn.Close() })}
		}, STARTTLS, "", "", "connecting"},
		"a server that dies in the middle": {func(t *testing.T) *mailServer {
			m := startMailServer(t, STARTTLS, false)
			m.data = func(c *smtp.Conn) error { return c.Conn().Close() }
			return m
		}, STARTTLS, "", "", "no answer"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			server := c.server(t)
			f.post(Message{Kind: Invite, To: recipient, Token: token})
			f.pass(f.courier(server.transport(t, c.security, c.user, c.pass)))
			if f.stored() != 1 || len(server.mails()) != 0 {
				t.Fatal("stored", f.stored(), "received", len(server.mails()))
			}
			if log := f.log.String(); !strings.Contains(log, c.says) || strings.Contains(log, "canary") {
				t.Errorf("%s\nwant %q", log, c.says)
			}
		})
	}
}

// If a connection breaks after the server took the mail, the mail is not sent again.
func TestAFarewellThatFailsIsNoFailure(t *testing.T) {
	f := newFixture(t)
	f.post(Message{Kind: Invite, To: recipient, Token: token})
	address := speak(t, func(conn net.Conn) {
		defer conn.Close()
		lines := bufio.NewScanner(conn)
		say := func(s string) { _, _ = conn.Write([]byte(s + "\r\n")) } // the test notices what is missing
		say("220 hello")
		for inData := false; lines.Scan(); {
			switch line := lines.Text(); {
			case inData && line == ".":
				say("250 taken")
				return
			case line == "DATA":
				inData = true
				say("354 go on")
			case !inData:
				say("250 yes")
			}
		}
	})
	s, err := NewSMTP(SMTPConfig{Address: address, Security: Plain})
	must(t, err)
	f.pass(f.courier(s))
	if f.stored() != 0 {
		t.Fatal(f.log)
	}
}

// A server that accepts connections and says nothing delays neither storing mails nor the end of
// Run.
func TestASilentServerBlocksNothing(t *testing.T) {
	f := newFixture(t)
	connected := make(chan struct{}, 100)
	address := speak(t, func(net.Conn) { connected <- struct{}{} })
	s, err := NewSMTP(SMTPConfig{Address: address, Security: STARTTLS})
	must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error)
	f.post(Message{Kind: Invite, To: recipient, Token: token})
	go func() { done <- f.outbox.Run(ctx, s, f.options()) }()
	<-connected
	for range 10 {
		f.post(Message{Kind: Invite, To: recipient, Token: token})
	}
	stop()
	select {
	case err := <-done:
		must(t, err)
	case <-time.After(sendTimeout / 2):
		t.Fatal("Run waits for the server")
	}
	if f.stored() != 11 {
		t.Error(f.stored())
	}
	if strings.Contains(f.log.String(), "giving up") {
		t.Error(f.log)
	}
}

// speak listens on loopback and calls serve for each connection.
func speak(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return // the test is over
			}
			go serve(conn)
		}
	}()
	return l.Addr().String()
}

func TestAnAddressThatIsNoneIsRefusedForGood(t *testing.T) {
	server := startMailServer(t, STARTTLS, false)
	s := server.transport(t, STARTTLS, "", "")
	for _, to := range []string{"canary", "a@b.example, canary@b.example", "a@b.example\r\nBcc: canary@b.example"} {
		err := s.Send(t.Context(), Envelope{ID: "mail_x", From: "a@b.example", To: to, Subject: "s", Text: "t\n"})
		if !errors.Is(err, ErrRefused) || strings.Contains(err.Error(), "canary") {
			t.Errorf("%q: %v", to, err)
		}
	}
	if err := s.Send(t.Context(), Envelope{ID: "mail_x", From: "nobody", To: recipient}); err == nil || errors.Is(err, ErrRefused) {
		t.Error("a bad sender:", err)
	}
	if len(server.mails()) != 0 {
		t.Error(server.mails())
	}
}

func TestABadConfigurationIsRefused(t *testing.T) {
	good := SMTPConfig{Address: "mail.example.com:587", Security: STARTTLS, Username: "u", Password: []byte("p")}
	if _, err := NewSMTP(good); err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(*SMTPConfig){
		"no port":                  func(c *SMTPConfig) { c.Address = "mail.example.com" },
		"no host":                  func(c *SMTPConfig) { c.Address = ":587" },
		"a port that is none":      func(c *SMTPConfig) { c.Address = "mail.example.com:99999" },
		"no security":              func(c *SMTPConfig) { c.Security = "" },
		"an unknown security":      func(c *SMTPConfig) { c.Security = "opportunistic" },
		"plain to another machine": func(c *SMTPConfig) { c.Security = Plain },
		"a username alone":         func(c *SMTPConfig) { c.Password = nil },
		"a password alone":         func(c *SMTPConfig) { c.Username = "" },
	} {
		c := good
		change(&c)
		if _, err := NewSMTP(c); err == nil {
			t.Error(name, "was taken")
		}
	}
	for _, host := range []string{"127.0.0.1:25", "[::1]:25", "localhost:25"} {
		if _, err := NewSMTP(SMTPConfig{Address: host, Security: Plain}); err != nil {
			t.Error(host, err)
		}
	}
}
