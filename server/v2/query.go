package v2

import (
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// badQuery returns the 400 of a wrong query parameter.
func badQuery(message string) error { return &refusal{http.StatusBadRequest, message} }

// badCursor turns a service's complaint about its query into a 400: an
// endpoint without a body has no other input that could be invalid.
func badCursor(err error) error {
	if fault.Of(err) == fault.Invalid {
		return badQuery(fault.Message(err))
	}
	return err
}

// parameters reads query parameters one after the other and keeps the first
// complaint. Each is given at most once and is not empty; unknown ones are
// ignored, as unknown fields of a body are.
type parameters struct {
	query url.Values
	err   error
}

func (p *parameters) fail(name, want string) {
	if p.err == nil {
		p.err = badQuery("the query parameter " + name + " must be " + want)
	}
}

// text returns the parameter, or "" when it is absent.
func (p *parameters) text(name string, maxLength int) string {
	values, present := p.query[name]
	if !present {
		return ""
	}
	if len(values) != 1 || values[0] == "" || len(values[0]) > maxLength {
		p.fail(name, "given once, with 1 to "+strconv.Itoa(maxLength)+" bytes")
		return ""
	}
	return values[0]
}

// integer returns the parameter, or 0 when it is absent.
func (p *parameters) integer(name string, maximum int) int {
	const digits = 10
	s := p.text(name, digits)
	if s == "" {
		return 0
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > maximum {
		p.fail(name, "a whole number from 1 to "+strconv.Itoa(maximum))
		return 0
	}
	return n
}

// time returns the parameter, or the zero time when it is absent.
func (p *parameters) time(name string) time.Time {
	const length = len("2006-01-02T15:04:05.999999999+00:00")
	s := p.text(name, length)
	if s == "" {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		p.fail(name, "a time such as 2006-01-02T15:04:05Z")
	}
	return t
}

// Bounds of lists.
const (
	maxLimit        = 100
	defaultLimit    = 20
	maxCursorLength = 512
)
