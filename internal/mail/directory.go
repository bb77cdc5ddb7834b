package mail

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/mail"
	"os"
	"path/filepath"
	"strings"

	gomail "github.com/wneessen/go-mail"

	"github.com/latticekeep/latticekeep/internal/durable"
)

// Directory writes each mail into a file of its own, id.eml with mode 0600, for a person to read.
// It is for development: the files contain the tokens in the clear.
type Directory string

// Send implements [Transport].
func (d Directory) Send(_ context.Context, e Envelope) error {
	m, err := compose(e, gomail.NoEncoding)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if _, err := m.WriteTo(&b); err != nil {
		return errors.New("writing out a mail failed")
	}
	if err := os.MkdirAll(string(d), 0o700); err != nil {
		return fmt.Errorf("making the mail directory: %w", err)
	}
	return durable.Write(filepath.Join(string(d), e.ID+".eml"), b.Bytes())
}

// compose makes the Internet message (RFC 5322) of a mail, with an encoding of its text.
func compose(e Envelope, encoding gomail.Encoding) (*gomail.Msg, error) {
	from, err := mail.ParseAddress(e.From)
	if err != nil {
		return nil, errors.New("the configured sender is not an e-mail address")
	}
	m := gomail.NewMsg(gomail.WithNoDefaultUserAgent())
	m.FromMailAddress(from)
	if err := m.To(e.To); err != nil { // the error would quote the address
		return nil, fmt.Errorf("%w: the address is not one", ErrRefused)
	}
	domain := from.Address[strings.LastIndexByte(from.Address, '@')+1:]
	m.SetMessageIDWithValue(e.ID + "@" + domain)
	m.SetDateWithValue(e.Date)
	m.SetGenHeader("Auto-Submitted", "auto-generated") // RFC 3834: prevents automatic answers
	m.Subject(e.Subject)
	m.SetBodyString(gomail.TypeTextPlain, e.Text, gomail.WithPartEncoding(encoding))
	return m, nil
}
