package keyring

import "testing"

func TestReportsAreVerifiedAsTheyAreSigned(t *testing.T) {
	f, other := newFixture(t, DefaultCacheTTL), newFixture(t, DefaultCacheTTL)
	report := []byte("a report")
	signature, err := f.ring.SignReport(report)
	if err != nil {
		t.Fatal(err)
	}
	backup, err := f.ring.SignBackup(report)
	if err != nil {
		t.Fatal(err)
	}
	if !f.ring.VerifyReport(report, signature) {
		t.Error("its own signature does not verify")
	}
	for name, ok := range map[string]bool{
		"other bytes":           f.ring.VerifyReport([]byte("another one"), signature),
		"another deployment's":  other.ring.VerifyReport(report, signature),
		"a backup's signature":  f.ring.VerifyReport(report, backup),
		"a signature too short": f.ring.VerifyReport(report, signature[1:]),
		"none":                  f.ring.VerifyReport(report, nil),
	} {
		if ok {
			t.Errorf("%s verifies", name)
		}
	}
}
