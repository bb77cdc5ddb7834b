// Package email decides what an e-mail address is and gives each its one spelling. It is pure.
package email

import (
	"errors"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/idna"
	"golang.org/x/text/secure/precis"

	"github.com/latticekeep/latticekeep/internal/fault"
)

const (
	maxAddress   = 254 // RFC 5321 §4.5.3.1.3
	maxLocalPart = 64  // RFC 5321 §4.5.3.1.1
)

var errAddress = fault.New(fault.Invalid, "the e-mail address is not valid: give one such as name@example.com")

// domains maps a domain name as a browser does and then applies the rules of host names, including
// the lengths of the DNS.
var domains = idna.New(idna.MapForLookup(), idna.BidiRule(), idna.StrictDomainName(true), idna.VerifyDNSLength(true))

// Canonical returns the one spelling of an e-mail address. Lookup, uniqueness, slow-down and mail
// all use it, so another spelling is never another account. The PRECIS profile UsernameCaseMapped
// (RFC 8265 §3.3) maps the local part, and IDNA maps the domain to its ASCII form. Quoted local
// parts, comments and address literals are refused. Error: fault.Invalid.
func Canonical(s string) (string, error) {
	if len(s) > 2*maxAddress || !utf8.ValidString(s) {
		return "", errAddress
	}
	local, domain, ok := strings.Cut(strings.TrimSpace(s), "@")
	if !ok {
		return "", errAddress
	}
	local, err1 := settled(local, precis.UsernameCaseMapped.String)
	domain, err2 := settled(domain, domains.ToASCII)
	canonical := local + "@" + domain
	if errors.Join(err1, err2) != nil || !dotAtom(local) || len(local) > maxLocalPart || strings.HasSuffix(domain, ".") || len(canonical) > maxAddress {
		return "", errAddress
	}
	return canonical, nil
}

// settled applies a mapping until it changes nothing, since neither mapping is promised to be
// idempotent (RFC 8264 §7 gives the reasons).
func settled(s string, apply func(string) (string, error)) (string, error) {
	for range 4 {
		next, err := apply(s)
		if err != nil || next == s {
			return next, err
		}
		s = next
	}
	return "", errAddress
}

// dotAtom reports whether s is a dot-atom of RFC 5322 §3.2.3, with the letters of RFC 6531 §3.3.
// None of its characters has a meaning in a mail header.
func dotAtom(s string) bool {
	for atom := range strings.SplitSeq(s, ".") {
		if atom == "" || strings.ContainsAny(atom, "\"(),:;<>@[]\\ ") {
			return false
		}
	}
	return true
}
