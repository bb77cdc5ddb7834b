package client

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"reflect"
	"strings"
	"time"
)

// call is one request, as the contract describes its operation, and how it is to be sent.
type call struct {
	method     string
	path       string   // with the names of its parameters in braces, as in the contract
	ids        []string // values of these parameters
	address    string   // whole URL in the place of base, path and parameters, unless it is empty
	parameters any      // pointer to a struct, nil for none: fields with a form tag are the query
	headers    map[string]string
	body       any // sent as JSON; nil for none

	isRepeatable bool       // carrying it out twice does no more than once: it is sent again although its outcome is unknown
	isAnonymous  bool       // it carries no credential
	isProbe      bool       // it asks about the present moment and is not sent again, whatever the answer
	isLasting    bool       // its answer may take as long as the context allows
	credential   credential // unless it is zero, the call carries this one, and a 401 does not renew the session
	refreshToken string     // the call carries it, unless it is empty
}

// get is a call that reads. net/http's Transport repeats such requests, too.
func get(path string, ids ...string) call {
	return call{method: http.MethodGet, path: path, ids: ids, isRepeatable: true}
}

// getFrom is a get from a URL that need not be the deployment's.
func getFrom(u *url.URL) call {
	return call{method: http.MethodGet, address: u.String(), isRepeatable: true}
}

func post(path string, body any, ids ...string) call {
	return call{method: http.MethodPost, path: path, ids: ids, body: body}
}

func put(path string, body any, ids ...string) call {
	return call{method: http.MethodPut, path: path, ids: ids, body: body}
}

func remove(path string, ids ...string) call {
	return call{method: http.MethodDelete, path: path, ids: ids}
}

// with gives the call the parameters of its query.
func (c call) with(parameters any) call {
	c.parameters = parameters
	return c
}

func (c call) withHeader(name, value string) call {
	c.headers = map[string]string{name: value}
	// The rule of net/http's Transport, which repeats such requests, too.
	c.isRepeatable = c.isRepeatable || name == idempotencyKey
	return c
}

func (c call) withRefreshToken(token string) call {
	c.refreshToken = token
	return c
}

// repeatable marks calls other than get that change nothing, or that set a state which they state
// in full.
func (c call) repeatable() call {
	c.isRepeatable = true
	return c
}

// anonymous marks operations that need no credential: it goes only where it is needed.
func (c call) anonymous() call {
	c.isAnonymous = true
	return c
}

func (c call) probe() call {
	c.isAnonymous, c.isProbe = true, true
	return c
}

func (c call) lasting() call {
	c.isLasting = true
	return c
}

func (c call) as(who credential) call {
	c.credential = who
	return c
}

// request returns the request of a call to the deployment at base. ErrInvalid: an id is empty.
func (c call) request(ctx context.Context, base string) (*http.Request, error) {
	address := c.address
	if address == "" {
		path, err := c.escapedPath()
		if err != nil {
			return nil, err
		}
		address = base + path
		if query := queryOf(c.parameters).Encode(); query != "" {
			address += "?" + query
		}
	}
	var body io.Reader
	if c.body != nil {
		encoded, err := json.Marshal(c.body)
		if err != nil {
			return nil, fmt.Errorf("making the request: %w", err)
		}
		body = bytes.NewReader(encoded)
	}
	r, err := http.NewRequestWithContext(ctx, c.method, address, body)
	if err != nil {
		return nil, fmt.Errorf("making the request: %w", err)
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/json")
	}
	for name, value := range c.headers {
		r.Header.Set(name, value)
	}
	return r, nil
}

// escapedPath returns the path with its ids. A dot is escaped where it would be a step in the tree
// (RFC 3986 §5.2.4), so that the call arrives at no other endpoint.
func (c call) escapedPath() (string, error) {
	segments, next := strings.Split(c.path, "/"), 0
	for i, segment := range segments {
		if !strings.HasPrefix(segment, "{") {
			continue
		}
		id := c.ids[next]
		next++
		switch id {
		case "":
			return "", fmt.Errorf("making the request: the id or name is empty: %w", ErrInvalid)
		case ".", "..":
			segments[i] = strings.ReplaceAll(id, ".", "%2E")
		default:
			segments[i] = url.PathEscape(id)
		}
	}
	return strings.Join(segments, "/"), nil
}

// queryOf returns the fields of a struct of parameters that have a form tag and are not nil.
func queryOf(parameters any) url.Values {
	query := url.Values{}
	v := reflect.Indirect(reflect.ValueOf(parameters))
	if !v.IsValid() {
		return query
	}
	for i := range v.NumField() {
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("form"), ",")
		value := reflect.Indirect(v.Field(i))
		if name == "" || !value.IsValid() {
			continue
		}
		switch value := value.Interface().(type) {
		case time.Time:
			query.Set(name, value.Format(time.RFC3339Nano))
		default:
			query.Set(name, fmt.Sprint(value))
		}
	}
	return query
}

// refreshCookie is the name under which the server sets the refresh token.
const refreshCookie = "refreshToken"

// credential is the header that says who calls; the zero value says nobody.
type credential struct {
	header, value string
	access        string // the access token, if it is one
	session       uint64 // the number of its session
}

func bearer(access string, session uint64) credential {
	return credential{"Authorization", "Bearer " + access, access, session}
}

// idempotencyKey is the header that makes a request the same as an earlier one.
const idempotencyKey = "Idempotency-Key"
