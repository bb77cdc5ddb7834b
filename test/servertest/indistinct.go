package servertest

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
)

// WantIndistinct sends every case of a question several times, in a random order, and fails unless
// all answers have one status, the same headers and, apart from the request id, one body. The clock
// stands still.
func (s *Service) WantIndistinct(t *testing.T, question string, status int, cases map[string]Request) {
	t.Helper()
	const rounds = 3
	var order []string
	for range rounds {
		for name := range cases {
			order = append(order, name)
		}
	}
	rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	want, wanted, remaining := "", "", 0
	for i, name := range order {
		r := s.Call(cases[name])
		if r.Status != status {
			t.Errorf("%s, %s: %d, want %d: %s", question, name, r.Status, status, r.Body)
			continue
		}
		left, err := strconv.Atoi(r.Header.Get("X-RateLimit-Remaining"))
		if err != nil || i > 0 && left != remaining-1 {
			t.Errorf("%s, %s: %d requests remain after %d: %v", question, name, left, remaining, err)
		}
		remaining = left
		if got := r.Mask(t); want == "" {
			want, wanted = got, name
		} else if got != want {
			t.Errorf("%s\n%s: %s\n%s: %s", question, name, got, wanted, want)
		}
	}
}

// Mask returns the whole answer without what differs in every answer.
func (r Reply) Mask(t testing.TB) string {
	t.Helper()
	id := r.Header.Get("X-Request-ID")
	header := r.Header.Clone()
	for _, own := range []string{"X-Request-ID", "X-RateLimit-Remaining", "Date"} {
		if header.Get(own) == "" {
			t.Errorf("no header %s", own)
		}
		header.Del(own)
	}
	return fmt.Sprint(r.Status, header, strings.ReplaceAll(string(r.Body), id, "its own"))
}
