package verify_test

import (
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// Unsigned data in a bucket is never accepted as a segment.
func FuzzVerifySegment(f *testing.F) {
	signer, err := dualsig.NewPrivateKey(make([]byte, dualsig.SeedSize))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(audittest.Zipped([]byte("{}\n")))
	f.Add(audittest.Zipped())
	f.Add([]byte("not gzip"))
	f.Add(append(audittest.Zipped([]byte(`{"checkpoint":"x"}`+"\n")), 0))
	f.Fuzz(func(t *testing.T, data []byte) {
		if _, _, err := verify.Segment(data, audit.Segment{From: 1, To: 1}, verify.Options{PublicKey: signer.Public()}); err == nil {
			t.Error("accepted")
		}
	})
}
