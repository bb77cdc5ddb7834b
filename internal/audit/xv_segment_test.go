package audit

import (
	"testing"

	"github.com/latticekeep/latticekeep/internal/dualsig"
)

// Unsigned data in a bucket is never accepted as a segment.
func FuzzVerifySegment(f *testing.F) {
	signer, err := dualsig.NewPrivateKey(make([]byte, dualsig.SeedSize))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(zipped([]byte("{}\n")))
	f.Add(zipped())
	f.Add([]byte("not gzip"))
	f.Add(append(zipped([]byte(`{"checkpoint":"x"}`+"\n")), 0))
	f.Fuzz(func(t *testing.T, data []byte) {
		if _, _, err := verifySegment(data, Segment{From: 1, To: 1}, Options{PublicKey: signer.Public()}); err == nil {
			t.Error("accepted")
		}
	})
}
