package mail

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"net/textproto"
	"os"
	"strconv"
	"strings"
	"sync"
	"unicode"

	gomail "github.com/wneessen/go-mail"

	"github.com/latticekeep/latticekeep/internal/secret"
)

// Security is the protection of the connection to a mail server.
type Security string

// The kinds of protection. There is no opportunistic one: a mail carries a token, and an attacker
// on the path could remove the offer of STARTTLS.
const (
	STARTTLS Security = "starttls" // begins without TLS and sends nothing unless the server upgrades
	TLS      Security = "tls"      // TLS from the first byte
	Plain    Security = "none"     // no TLS; only to a loopback address
)

// SMTPConfig configures an [SMTP].
type SMTPConfig struct {
	Address  string // host:port of the mail server
	Security Security
	Username string       // empty: no authentication
	Password secret.Bytes // required with Username

	RootCAs *x509.CertPool // default: the system's
}

// SMTP hands mails to a mail server, each over a connection of its own.
type SMTP struct {
	config SMTPConfig
	host   string
	port   int
}

// NewSMTP checks the configuration. It does not connect.
func NewSMTP(c SMTPConfig) (*SMTP, error) {
	host, digits, err := net.SplitHostPort(c.Address)
	port, portErr := strconv.ParseUint(digits, 10, 16)
	if err != nil || portErr != nil || host == "" || port == 0 {
		return nil, errors.New("the mail server's address is not host:port")
	}
	switch c.Security {
	case STARTTLS, TLS:
	case Plain:
		if !loopback(host) {
			return nil, errors.New(`the security "none" is for a mail server on a loopback address: use starttls or tls`)
		}
	default:
		return nil, errors.New("the security of the mail server's connection is starttls, tls or none")
	}
	if (c.Username == "") != (len(c.Password) == 0) {
		return nil, errors.New("the mail server's username and password go together: give both or neither")
	}
	return &SMTP{config: c, host: host, port: int(port)}, nil
}

func loopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// Send implements [Transport].
func (s *SMTP) Send(ctx context.Context, e Envelope) error {
	// A text in ASCII is not encoded, because quoted-printable breaks the long line of a token, which
	// people and scripts copy. Any other is, for servers without 8BITMIME.
	encoding := gomail.NoEncoding
	if strings.ContainsFunc(e.Text, func(r rune) bool { return r > unicode.MaxASCII }) {
		encoding = gomail.EncodingQP
	}
	m, err := compose(e, encoding)
	if err != nil {
		return err
	}
	var conns connections
	defer conns.close() // the library leaves connections open after some failures
	stop := context.AfterFunc(ctx, conns.close)
	defer stop()
	client, err := gomail.NewClient(s.host, s.options(&conns)...)
	if err != nil {
		return fmt.Errorf("preparing to send a mail: %w", err)
	}
	err = client.DialAndSendWithContext(ctx, m)
	switch {
	case m.IsDelivered(): // only closing the session can have failed
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("the mail server did not take the mail in time: %w", ctx.Err())
	}
	return outcome(err)
}

func (s *SMTP) options(conns *connections) []gomail.Option {
	config := &tls.Config{ServerName: s.host, MinVersion: tls.VersionTLS12, RootCAs: s.config.RootCAs}
	options := []gomail.Option{
		gomail.WithPort(s.port), gomail.WithTimeout(sendTimeout), gomail.WithTLSConfig(config), gomail.WithTLSPolicy(gomail.TLSMandatory),
	}
	dial := (&net.Dialer{}).DialContext
	switch s.config.Security {
	case TLS:
		dial = (&tls.Dialer{Config: config}).DialContext
		options = append(options, gomail.WithSSL())
	case Plain:
		options = append(options, gomail.WithTLSPolicy(gomail.NoTLS))
	}
	if s.config.Username != "" {
		options = append(options,
			gomail.WithUsername(s.config.Username), gomail.WithPassword(string(s.config.Password)),
			gomail.WithOpportunisticSMTPAuth(gomail.SMTPAuthSCRAMSHA256, gomail.SMTPAuthPlain, gomail.SMTPAuthLogin))
	}
	return append(options, gomail.WithDialContextFunc(func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err == nil {
			conns.add(conn)
		}
		return conn, err
	}))
}

// connections closes all connections at the timeout, also those that are blocked.
type connections struct {
	mu     sync.Mutex
	open   []net.Conn
	closed bool
}

func (c *connections) add(conn net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		_ = conn.Close()
		return
	}
	c.open = append(c.open, conn)
}

func (c *connections) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for _, conn := range c.open {
		_ = conn.Close() // the mail is sent or not by now
	}
}

// outcome describes a failure without quoting the server, whose answers may quote the recipient.
func outcome(err error) error {
	if sent := new(gomail.SendError); errors.As(err, &sent) {
		code := sent.ErrorCode()
		what := fmt.Errorf("%s: the mail server answered %d %s", sent.Reason, code, sent.EnhancedStatusCode())
		if code == 0 {
			what = fmt.Errorf("%s: no answer from the mail server", sent.Reason)
		}
		switch sent.Reason {
		case gomail.ErrSMTPRcptTo, gomail.ErrSMTPData, gomail.ErrSMTPDataClose:
			if code >= 500 && code/10 != 53 { // 53x is about our authentication (RFC 4954), which the configuration can fix
				return fmt.Errorf("%w: %w", ErrRefused, what)
			}
		}
		return what
	}
	if answer := new(textproto.Error); errors.As(err, &answer) {
		return fmt.Errorf("presenting ourselves to the mail server: it answered %d", answer.Code)
	}
	for _, known := range []any{new(*net.OpError), new(*net.DNSError), new(*tls.CertificateVerificationError), new(tls.RecordHeaderError)} {
		if errors.As(err, known) {
			return fmt.Errorf("connecting to the mail server: %w", err)
		}
	}
	if errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) {
		return errors.New("connecting to the mail server: it broke off")
	}
	return errors.New("connecting to the mail server: it does not offer what is configured (security, or a way to sign in)")
}
