package token

import (
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/secret"
)

func TestAMegabyteOfDotsCostsNothing(t *testing.T) {
	s := NewSigner(secret.Bytes("key"), "chain", time.Now)
	dots := strings.Repeat(".", 1<<20)
	if n := testing.AllocsPerRun(10, func() { _, _, _ = s.Verify(dots) }); n > 2 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzIsForeign(f *testing.F) {
	f.Fuzz(func(t *testing.T, token string) {
		if IsForeign(token) && (len(token) > maxAccess || strings.Count(token, ".") != 2) {
			t.Errorf("%q", token)
		}
	})
}
