package postgres

import (
	"errors"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
)

func TestTheTimeIsTheServersAndComesBackWithIt(t *testing.T) {
	server := breakable(t)
	s, err := Open(t.Context(), server.URL(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	before := time.Now()
	now, err := s.Time(t.Context())
	if err != nil || now.Before(before.Add(-time.Second)) || now.After(time.Now().Add(time.Second)) {
		t.Fatal(now, err)
	}
	if err := server.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Time(t.Context()); !errors.Is(err, fault.Unavailable) {
		t.Fatal("a server that is dead tells its time:", err)
	}
	if err := server.Restart(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it does not come back", func() bool {
		now, err = s.Time(t.Context())
		return err == nil
	})
	if now.Before(before) {
		t.Fatal(now)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Time(t.Context()); !errors.Is(err, fault.Unavailable) {
		t.Fatal(err)
	}
}
