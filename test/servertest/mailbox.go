package servertest

import (
	"context"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/mail"
)

// Mailbox takes the service's mail.
type Mailbox struct {
	mu       sync.Mutex
	received []mail.Envelope
	arrived  chan struct{}
}

func (m *Mailbox) Send(_ context.Context, e mail.Envelope) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.received = append(m.received, e)
	select {
	case m.arrived <- struct{}{}:
	default:
	}
	return nil
}

// MailTo waits for the n-th message to an address.
func (s *Service) MailTo(address string, n int) mail.Envelope {
	s.T.Helper()
	deadline := time.After(30 * time.Second)
	for {
		s.Mailbox.mu.Lock()
		found := 0
		for _, e := range s.Mailbox.received {
			if e.To == address {
				if found++; found == n {
					s.Mailbox.mu.Unlock()
					return e
				}
			}
		}
		s.Mailbox.mu.Unlock()
		select {
		case <-s.Mailbox.arrived:
		case <-deadline:
			s.T.Fatalf("no mail number %d to the address", n)
		}
	}
}

var MailedToken = regexp.MustCompile(`"token":\s*"([^"]+)"`)

// TokenMailedTo returns the token in the n-th message to an address.
func (s *Service) TokenMailedTo(address string, n int) string {
	s.T.Helper()
	m := MailedToken.FindStringSubmatch(s.MailTo(address, n).Text)
	if m == nil {
		s.T.Fatal("the mail has no token")
	}
	return m[1]
}

// Received returns all messages so far.
func (m *Mailbox) Received() []mail.Envelope {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.received)
}
