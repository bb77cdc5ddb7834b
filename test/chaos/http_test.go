package chaos

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"syscall"
	"time"
)

// errContract is an answer that violates the contract, whatever has failed.
var errContract = errors.New("an answer that the contract does not have")

// over returns a function that sends calls over HTTP to the server that server returns, which
// changes after a kill. strange receives answers that must never occur.
func (d *deployment) over(server func() *process, strange func(error)) func(call) answer {
	return func(c call) answer {
		method, path, body := c.request()
		got, err := server().ask(d.key, method, path, body, c.once())
		if errors.Is(err, syscall.ECONNREFUSED) && c.action != seal { // the transport may have repeated a seal
			return answer{unasked: true}
		}
		for tries := 0; c.action == seal && tries < 20 && (err != nil || got.status == http.StatusServiceUnavailable); tries++ {
			// A seal with an idempotency key may be repeated until it is answered.
			time.Sleep(20 * time.Millisecond)
			got, err = server().ask(d.key, method, path, body, c.once())
		}
		switch {
		case err != nil, got.status == http.StatusServiceUnavailable:
			return answer{unknown: true}
		case got.status == http.StatusForbidden && c.action != list && c.action != seal:
			return answer{denied: true}
		case got.status/100 != 2:
			strange(fmt.Errorf("%w: %s: %d, %v", errContract, c.action, got.status, got.made))
			return answer{unknown: true}
		}
		if c.action == unseal || c.action == unsealNewest {
			d.show(got.request)
		}
		return c.answered(got.made)
	}
}

// once returns the idempotency key of a seal.
func (c call) once() string {
	if c.action == seal {
		return c.value
	}
	return ""
}

func (c call) request() (method, path, body string) {
	values := fmt.Sprintf(`{"v":%q}`, c.value)
	switch c.action {
	case seal:
		return "POST", "/api/v2/vault/seal", fmt.Sprintf(`{"name":%q,"credential_type":"t","values":%s,"ttl_days":30}`, c.name, values)
	case replace:
		return "PUT", "/api/v2/vault/" + c.id, `{"values":` + values + `}`
	case rotate:
		return "POST", "/api/v2/vault/rotate/" + c.id, ""
	case remove:
		return "DELETE", "/api/v2/vault/" + c.id, ""
	case unseal:
		return "GET", "/api/v2/vault/" + c.id, ""
	case unsealNewest:
		return "GET", "/api/v2/vault/by-name/" + url.PathEscape(c.name), ""
	default:
		return "GET", "/api/v2/vault/list", ""
	}
}

func (c call) answered(made map[string]any) answer {
	saw := func(m map[string]any) sight {
		created, _ := time.Parse(time.RFC3339Nano, m["created_at"].(string))
		version := m["version"].(float64)
		return sight{id: m["credential_id"].(string), version: uint64(version), created: created.UnixMicro()}
	}
	switch c.action {
	case remove:
		return answer{}
	case list:
		var seen []named
		for _, each := range made["credentials"].([]any) {
			m := each.(map[string]any)
			seen = append(seen, named{m["name"].(string), saw(m)})
		}
		return answer{seen: ofName(c.name, seen), all: seen}
	}
	s := saw(made)
	switch c.action {
	case seal, replace:
		s.value = c.value
	case unseal, unsealNewest:
		s.value = made["values"].(map[string]any)["v"].(string)
	}
	return answer{seen: []sight{s}}
}
