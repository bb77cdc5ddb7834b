package client

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"strconv"
	"strings"
	"time"
)

// call is one request, with the operation as the contract describes it and the rules for sending
// it.
type call struct {
	method     string
	path       string   // path with parameter names in braces, as in the contract
	ids        []string // values of these parameters
	address    string   // complete URL instead of base, path and parameters; "" for none
	parameters any      // pointer to a struct, nil for none: fields with a form tag become the query
	headers    map[string]string
	body       any // sent as JSON; nil for none

	entityTag    *string    // receives the ETag of the answer; nil for none
	isRepeatable bool       // repeating the call has no further effect, so it is repeated although its outcome is unknown
	isAnonymous  bool       // it carries no credential
	isProbe      bool       // it asks about the present moment and is never repeated
	isLasting    bool       // its answer may take as long as the context allows
	wait         int        // seconds that the server may wait for a change; 0 for none
	credential   credential // unless it is zero, the call carries this credential, and a 401 does not renew the session
	refreshToken string     // refresh token that the call carries; "" for none
}

// get returns a call that reads. net/http's Transport repeats such requests, too.
func get(path string, ids ...string) call {
	return call{method: http.MethodGet, path: path, ids: ids, isRepeatable: true}
}

// getFrom returns a get from a URL that need not belong to the deployment.
func getFrom(u *url.URL) call {
	return call{method: http.MethodGet, address: u.String(), isRepeatable: true}
}

func post(path string, body any, ids ...string) call {
	return call{method: http.MethodPost, path: path, ids: ids, body: body}
}

func put(path string, body any, ids ...string) call {
	return call{method: http.MethodPut, path: path, ids: ids, body: body}
}

func patch(path string, body any, ids ...string) call {
	return call{method: http.MethodPatch, path: path, ids: ids, body: body}
}

func remove(path string, ids ...string) call {
	return call{method: http.MethodDelete, path: path, ids: ids}
}

// with sets the parameters of the query.
func (c call) with(parameters any) call {
	c.parameters = parameters
	return c
}

func (c call) withHeader(name, value string) call {
	c.headers = maps.Clone(c.headers)
	if c.headers == nil {
		c.headers = make(map[string]string)
	}
	c.headers[name] = value
	// net/http's Transport has the same rule and repeats such requests, too.
	c.isRepeatable = c.isRepeatable || name == idempotencyKey && value != ""
	return c
}

// CallOption changes how one call is sent, or says what else of its answer is wanted.
type CallOption func(*call)

// IfMatch makes a change of a credential depend on its version: it is made only while the credential
// is one that an ETag in value names; "*" names any. Otherwise the error is [ErrPreconditionFailed].
// After an answer that was lost, the same call may fail so because it was carried out: read the
// credential again.
func IfMatch(value string) CallOption {
	return func(c *call) { *c = c.withHeader("If-Match", value) }
}

// IfNoneMatch makes [V2.PutCredentialByName] store only a new credential. When there is one, the error
// is [ErrPreconditionFailed].
func IfNoneMatch() CallOption {
	return func(c *call) { *c = c.withHeader("If-None-Match", "*") }
}

// OtherThan makes a read of a credential answer only while it has another ETag than tag, as it has for
// each version. Otherwise the error is [ErrNotModified]. The ETag of an earlier read comes from [EntityTag]; "" is
// no condition.
func OtherThan(tag string) CallOption {
	return func(c *call) {
		if tag != "" {
			*c = c.withHeader("If-None-Match", tag)
		}
	}
}

// Wait lets the server wait for up to so many seconds, 1 to 55, until [OtherThan] holds. It answers at
// once then.
func Wait(seconds int) CallOption { return func(c *call) { c.wait = seconds } }

// Bearer sends the call as the holder of a token, such as that of a ServiceAccount, instead of the
// client's own credential. Read the token again for each call: the kubelet replaces it.
func Bearer(token string) CallOption { return func(c *call) { c.credential = bearer(token, 0) } }

// EntityTag stores the ETag of the credential that the call reads in tag, for [IfMatch] and [OtherThan].
func EntityTag(tag *string) CallOption { return func(c *call) { c.entityTag = tag } }

// changed returns the call with its options.
func (c call) changed(options []CallOption) call {
	for _, option := range options {
		option(&c)
	}
	return c
}

func (c call) withRefreshToken(token string) call {
	c.refreshToken = token
	return c
}

// repeatable marks a call other than get that is safe to repeat, because it changes nothing or sets
// a complete state.
func (c call) repeatable() call {
	c.isRepeatable = true
	return c
}

// anonymous marks a call that needs no credential, so that the credential goes only where it is
// needed.
func (c call) anonymous() call {
	c.isAnonymous = true
	return c
}

func (c call) probe() call {
	c.isProbe = true
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

// request returns the HTTP request of the call to the deployment at base. ErrInvalid: an id is
// empty.
func (c call) request(ctx context.Context, base string) (*http.Request, error) {
	address := c.address
	if address == "" {
		path, err := c.escapedPath()
		if err != nil {
			return nil, err
		}
		address = base + path
		query := queryOf(c.parameters)
		if c.wait != 0 {
			query.Set("wait", strconv.Itoa(c.wait))
		}
		if len(query) > 0 {
			address += "?" + query.Encode()
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

// escapedPath returns the path with its ids. It escapes the dots of a dot segment (RFC 3986
// §5.2.4), so that the call cannot reach another endpoint.
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

// queryOf returns the fields of a parameter struct that have a form tag and are not nil.
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

// refreshCookie is the name of the cookie that holds the refresh token.
const refreshCookie = "refreshToken"

// credential is the header that authenticates the caller. The zero value authenticates nobody.
type credential struct {
	header, value string
	access        string // the access token, if it is one
	session       uint64 // the number of its session
}

func bearer(access string, session uint64) credential {
	return credential{"Authorization", "Bearer " + access, access, session}
}

// idempotencyKey is the header that marks a request as a repetition of an earlier one.
const idempotencyKey = "Idempotency-Key"
