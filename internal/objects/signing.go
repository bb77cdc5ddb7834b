package objects

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// SigningOptions are for the URLs of objects in a folder, which this service
// serves itself. The zero value has no such URLs.
type SigningOptions struct {
	// BaseURL is where objects are served, such as
	// https://vault.example.com/api/v2/compliance/download: absolute, without a
	// query.
	BaseURL string
	// Secret authenticates the URLs: 32 random bytes or more, the same for all
	// who serve them.
	Secret []byte
	// Now is the clock by which URLs end; nil is time.Now.
	Now func() time.Time
}

const (
	minSecret   = 32                 // bytes
	maxLifetime = 7 * 24 * time.Hour // as clouds have it
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

// newSigner returns nil for the zero value.
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

// mac is over lines, none of which can contain a newline.
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

// verify returns the name, and whether the URL is one of ours and has not ended.
func (s *signer) verify(u *url.URL) (name string, ok bool) {
	q, err := url.ParseQuery(u.RawQuery)
	expiry, name := q.Get("expiry"), q.Get("obj")
	good := hmac.Equal([]byte(s.mac(expiry, name)), []byte(q.Get("signature")))
	end, err2 := strconv.ParseInt(expiry, 10, 64)
	// Exactly the URL that was given out, but for where it was sent: what
	// nobody signed may not stand in it.
	alone := len(q) == 4 && len(q["expiry"]) == 1 && len(q["obj"]) == 1 && len(q["signature"]) == 1 &&
		len(q["method"]) == 1 && q.Get("method") == http.MethodGet
	ok = good && alone && errors.Join(err, err2, checkName(name)) == nil && s.now().Unix() < end
	return name, ok
}

// SignedURL returns a URL under which whoever has it can read the object, which
// need not exist yet, until the lifetime is over, which is from one second to
// seven days long. It keeps an object in a folder from [Bucket.Expire] as a write
// does. Errors: fault.Invalid for a name or lifetime that is not allowed,
// fault.Unavailable when the cloud's credentials cannot sign.
func (b *Bucket) SignedURL(ctx context.Context, name string, lifetime time.Duration) (string, error) {
	if err := checkName(name); err != nil {
		return "", err
	}
	if lifetime < time.Second || lifetime > maxLifetime {
		return "", fault.New(fault.Invalid, "the lifetime of a signed URL must be from one second to seven days")
	}
	if b.folder != nil {
		if b.signer == nil {
			return "", fault.Wrap(fault.Internal, "internal error", errors.New("the bucket was opened without a base for signed URLs"))
		}
		b.folder.touch(name) // so that it does not expire before its URL
		return b.signer.sign(name, lifetime), nil
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	u, err := b.cloud.sign(ctx, b.prefix+name, lifetime)
	if err != nil {
		return "", fault.Wrap(fault.Unavailable, "object storage signs no URL: give the service credentials that may sign",
			fmt.Errorf("signing a URL for %s: %w", name, err))
	}
	return u, nil
}

// Verify returns the name of the object that a URL of [Bucket.SignedURL] is for,
// which is read from the query alone. Error: fault.Forbidden, always the same,
// when the URL is not one of this bucket's or has ended.
func (b *Bucket) Verify(u *url.URL) (name string, err error) {
	if b.signer != nil {
		if name, ok := b.signer.verify(u); ok {
			return name, nil
		}
	}
	return "", fault.New(fault.Forbidden, "access denied")
}
