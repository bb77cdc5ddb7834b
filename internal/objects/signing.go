package objects

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// SigningOptions configure the URLs of objects in a folder, which this service serves itself. The
// zero value disables such URLs.
type SigningOptions struct {
	// BaseURL is the address at which objects are served, such as
	// https://vault.example.com/api/v2/compliance/download. It is absolute and has no query.
	BaseURL string
	// Secret authenticates the URLs: 32 random bytes or more, the same for all servers of the
	// objects.
	Secret []byte
	// Now is the clock for the expiry of URLs; nil means time.Now.
	Now func() time.Time
}

const (
	minSecret   = 32                 // bytes
	maxLifetime = 7 * 24 * time.Hour // the limit of the clouds
)

// signer makes and checks URLs: the base URL with the parameters
//
//	expiry     Unix seconds from which on the URL is refused
//	method     GET
//	obj        name of the object
//	signature  base64url, without padding, of HMAC-SHA256 over the text of [signer.mac]
type signer struct {
	base   string
	secret []byte
	now    func() time.Time
}

// newSigner returns a signer, or nil for the zero value of o.
func newSigner(o SigningOptions) (*signer, error) {
	if o.BaseURL == "" && len(o.Secret) == 0 {
		return nil, nil
	}
	u, err := url.Parse(o.BaseURL)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil {
		return nil, fault.New(fault.Invalid, "the base of signed URLs must be an absolute http or https URL without a query")
	}
	if len(o.Secret) < minSecret {
		return nil, fault.New(fault.Invalid, "the secret of signed URLs must have at least 32 bytes")
	}
	s := &signer{base: o.BaseURL, secret: append([]byte(nil), o.Secret...), now: o.Now}
	if s.now == nil {
		s.now = time.Now
	}
	return s, nil
}

// mac returns the MAC over lines. No line can contain a newline.
func (s *signer) mac(expiry, name string) string {
	h := hmac.New(sha256.New, s.secret)
	h.Write([]byte(strings.Join([]string{"latticekeep/signed-url/v1", s.base, http.MethodGet, expiry, name}, "\n")))
	return base64.RawURLEncoding.EncodeToString(h.Sum(nil))
}

func (s *signer) sign(name string, lifetime time.Duration) string {
	expiry := strconv.FormatInt(s.now().Add(lifetime).Unix(), 10)
	return s.base + "?" + url.Values{
		"expiry": {expiry}, "method": {http.MethodGet}, "obj": {name}, "signature": {s.mac(expiry, name)},
	}.Encode()
}

// verify returns the name, and whether the URL was signed here and has not expired.
func (s *signer) verify(u *url.URL) (name string, ok bool) {
	q, err := url.ParseQuery(u.RawQuery)
	expiry, name := q.Get("expiry"), q.Get("obj")
	good := hmac.Equal([]byte(s.mac(expiry, name)), []byte(q.Get("signature")))
	end, err2 := strconv.ParseInt(expiry, 10, 64)
	// The query must be exactly the signed one, without unsigned parameters. Host and path are not
	// compared.
	alone := len(q) == 4 && len(q["expiry"]) == 1 && len(q["obj"]) == 1 && len(q["signature"]) == 1 &&
		len(q["method"]) == 1 && q.Get("method") == http.MethodGet
	ok = good && alone && errors.Join(err, err2, checkName(name)) == nil && s.now().Unix() < end
	return name, ok
}
