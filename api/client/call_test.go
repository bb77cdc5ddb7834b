package client

import (
	"errors"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// eachWithID calls f with every method that takes an id or a name.
func eachWithID(t *testing.T, f func(t *testing.T, name string, n *wire, call func(id string) error)) {
	t.Helper()
	count := 0
	for _, version := range []func(*Client) any{func(c *Client) any { return c.V1 }, func(c *Client) any { return c.V2 }} {
		n := &wire{answer: always(http.StatusOK)}
		methods := reflect.ValueOf(version(n.client(t)))
		for i := range methods.NumMethod() {
			m, takes := methods.Method(i), false
			for j := range m.Type().NumIn() {
				takes = takes || m.Type().In(j).Kind() == reflect.String
			}
			if !takes {
				continue
			}
			count++
			f(t, methods.Type().Method(i).Name, n, func(id string) error {
				results := m.Call(arguments(t, m.Type(), id))
				err, _ := results[len(results)-1].Interface().(error)
				return err
			})
		}
	}
	if count < 15 {
		t.Fatalf("only %d methods take an id", count)
	}
}

func TestEveryIDArrivesAsItIs(t *testing.T) {
	eachWithID(t, func(t *testing.T, name string, n *wire, call func(string) error) {
		if err := call("id"); err != nil {
			t.Fatal(name, err)
		}
		all := n.all()
		plain := strings.Split(all[len(all)-1].path, "/")
		for id, want := range map[string]string{
			".": "%2E", "..": "%2E%2E", "...": "...", ".a": ".a", "%2e": "%252e", "%2E%2E": "%252E%252E",
			"/": "%2F", "../x": "..%2Fx", "a b+c": "a%20b+c", "?#": "%3F%23", "ü": "%C3%BC",
			"\x00": "%00", "\x00.": "%00.", "\x00\x00": "%00%00", "a\x00": "a%00",
		} {
			err := call(id)
			all := n.all()
			escaped := all[len(all)-1].escaped
			got := strings.Split(escaped, "/")
			wanted := slices.Clone(plain)
			for i, part := range plain { // some have two ids
				if part == "id" {
					wanted[i] = want
				}
			}
			if err != nil || !slices.Equal(got, wanted) {
				t.Errorf("%s(%q) asks for %s: %v", name, id, escaped, err)
			}
		}
	})
}

func TestAnEmptyIDIsRefusedAndNothingIsSent(t *testing.T) {
	eachWithID(t, func(t *testing.T, name string, n *wire, call func(string) error) {
		before := len(n.all())
		if err := call(""); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "empty") || len(n.all()) != before {
			t.Errorf("%s: %v, %d requests", name, err, len(n.all())-before)
		}
	})
}
