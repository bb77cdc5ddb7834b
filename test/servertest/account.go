package servertest

import (
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/mail"
)

// EveryScope lists all scopes of a tenant.
const EveryScope = "vault:read vault:write crypto:encrypt crypto:decrypt crypto:sign crypto:verify " +
	"keys:read keys:write audit:read audit:names audit:write compliance:read account:admin"

// TenantOf returns the tenant of a user.
func (s *Service) TenantOf(a Account) authz.TenantID {
	s.T.Helper()
	me := s.Call(Request{Method: "GET", Path: "/api/v2/auth/me", Bearer: a.Access}).Want(s.T, http.StatusOK)
	return authz.TenantID(me["tenant"].(map[string]any)["tenant_id"].(string))
}

const OtherPassword = "staple battery, horse correct"

// ResetTokenMailedTo waits for an e-mail with a password-reset token and returns the token.
func (s *Service) ResetTokenMailedTo(address string) string {
	s.T.Helper()
	for n := 1; ; n++ {
		if m := MailedToken.FindStringSubmatch(s.MailTo(address, n).Text); m != nil && strings.HasPrefix(m[1], "lk_reset_") {
			return m[1]
		}
	}
}

// Send sends a request with an access token, or anonymously without one.
func (s *Service) Send(method, path, access string, body any) Reply {
	s.T.Helper()
	r := Request{Method: method, Path: path, Bearer: access}
	if body != nil {
		r.Body = Marshal(s.T, body)
	}
	return s.Call(r)
}

// RegisterVerified registers a user and verifies the e-mail address with the mailed token.
func (s *Service) RegisterVerified(email string) Account {
	s.T.Helper()
	a := s.Register(email)
	s.Send("POST", "/api/v2/auth/verify-email", "", map[string]string{"token": s.TokenMailedTo(email, 1)}).Want(s.T, http.StatusOK)
	return a
}

// Me returns the service's information about the user of an access token.
func (s *Service) Me(access string) map[string]any {
	s.T.Helper()
	return s.Send("GET", "/api/v2/auth/me", access, nil).Want(s.T, http.StatusOK)
}

// Account is a signed-in user.
type Account struct {
	Email, Password string
	Access, Refresh string
}

const Password = "correct horse battery staple"

// Register registers a user with a new tenant and signs the user in.
func (s *Service) Register(email string) Account {
	s.T.Helper()
	body := Marshal(s.T, map[string]string{"email": email, "password": Password, "tenant_name": "Example"})
	s.Call(Request{Method: "POST", Path: "/api/v2/auth/register", Body: body}).Want(s.T, http.StatusCreated)
	return s.Login(email, Password)
}

// Login signs a user in.
func (s *Service) Login(email, password string) Account {
	s.T.Helper()
	r := s.Call(Request{Method: "POST", Path: "/api/v2/auth/login", Body: Marshal(s.T, map[string]string{"email": email, "password": password})})
	a := Account{Email: email, Password: password, Access: r.Want(s.T, http.StatusOK)["access_token"].(string)}
	a.Refresh = r.Cookie(s.T, "refreshToken").Value
	return a
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
