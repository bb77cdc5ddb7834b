package inspection

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/backup/schedule"
	"github.com/latticekeep/latticekeep/internal/diagnosis"
	"github.com/latticekeep/latticekeep/internal/store/format"
)

func want(t *testing.T, name string, l diagnosis.Line, status diagnosis.Status, words string) {
	t.Helper()
	if l.Status != status || !strings.Contains(l.Message, words) {
		t.Errorf("%s: want %s with %q, got %s: %s", name, status, words, l.Status, l.Message)
	}
	if (l.Status == diagnosis.Failed || l.Status == diagnosis.Warning) && l.Remedy == "" {
		t.Errorf("%s: nothing says what to do", name)
	}
}

func TestClocksAreJudged(t *testing.T) {
	now := time.Now()
	at := func(d time.Duration) audit.Position {
		return audit.Position{Sequence: 7, Micros: now.Add(d).UnixMicro()}
	}
	want(t, "the same", judgeClock(now, 0, "x", at(-time.Minute)), diagnosis.OK, "")
	want(t, "a little off", judgeClock(now, time.Second, "x", at(time.Second)), diagnosis.OK, "")
	want(t, "apart", judgeClock(now, -time.Minute, "x", at(0)), diagnosis.Warning, "60 seconds apart")
	want(t, "hours apart", judgeClock(now, 3*time.Hour, "x", at(0)), diagnosis.Failed, "3 hours apart")
	want(t, "an entry of the future", judgeClock(now, 0, "x", at(50*time.Hour)), diagnosis.Failed, "the newest entry, 7, ")
	want(t, "no entry", judgeClock(now, 0, "x", audit.Position{}), diagnosis.OK, "")
}

func TestBackupsAreJudgedByTheirAge(t *testing.T) {
	now, every := time.Now(), 24*time.Hour
	ago := func(hours time.Duration) time.Time { return now.Add(-hours * time.Hour) }
	for name, tc := range map[string]struct {
		s      schedule.Status
		status diagnosis.Status
		words  string
	}{
		"young":                 {schedule.Status{Taken: ago(20), Verified: ago(20), Bytes: 5e6}, diagnosis.OK, "20 hours ago, verified, 5 MB"},
		"none":                  {schedule.Status{}, diagnosis.Warning, "no backup"},
		"never verified":        {schedule.Status{Taken: ago(20)}, diagnosis.Warning, "was not verified"},
		"the newest unverified": {schedule.Status{Taken: ago(1), Verified: ago(25)}, diagnosis.Warning, "is not verified"},
		"old":                   {schedule.Status{Taken: ago(49), Verified: ago(49)}, diagnosis.Failed, "2 days ago, and one is due every 24 hours"},
		"not verified for long": {schedule.Status{Taken: ago(1), Verified: ago(100)}, diagnosis.Failed, "4 days ago"},
	} {
		want(t, name, judgeBackups(tc.s, every, now), tc.status, tc.words)
	}
}

func TestReplicasAreJudgedByTheFormatsThatTheyRead(t *testing.T) {
	want(t, "alike", judgeReaders(map[int]int{format.Reads: 9}, "v1"), diagnosis.OK, "")
	want(t, "alone", judgeReaders(nil, "v1"), diagnosis.OK, "")
	want(t, "an older one", judgeReaders(map[int]int{format.Reads: 9, 2: 1}, "v1"), diagnosis.Warning, fmt.Sprintf("up to 2 and %d", format.Reads))
}

func TestAnchorsAreJudgedByTheirState(t *testing.T) {
	old := time.Now().Add(-time.Hour)
	for name, tc := range map[string]struct {
		a      keeper.AnchorStatus
		status diagnosis.Status
		words  string
	}{
		"well":        {keeper.AnchorStatus{State: keeper.AnchorOK, Sequence: 8, Time: time.Now()}, diagnosis.OK, "2 behind the head"},
		"idle":        {keeper.AnchorStatus{State: keeper.AnchorOK, Sequence: 10, Time: old}, diagnosis.OK, "0 behind"},
		"begun":       {keeper.AnchorStatus{State: keeper.AnchorOK}, diagnosis.OK, "no checkpoint yet"},
		"behind":      {keeper.AnchorStatus{State: keeper.AnchorOK, Sequence: 8, Time: old}, diagnosis.Warning, "2 behind the head, and of "},
		"unreachable": {keeper.AnchorStatus{State: keeper.AnchorUnreachable}, diagnosis.Failed, "could not be read"},
		"foreign":     {keeper.AnchorStatus{State: keeper.AnchorRefused}, diagnosis.Failed, "no checkpoint of this log"},
		"a rollback":  {keeper.AnchorStatus{State: keeper.AnchorRollback, Sequence: 12}, diagnosis.Failed, "of entry 12, and the head is entry 10"},
	} {
		tc.a.Name = "bucket"
		lines := Deployment{}.judgeAnchors([]keeper.AnchorStatus{tc.a}, 10)
		want(t, name, lines[0], tc.status, tc.words)
	}
	want(t, "none", Deployment{}.judgeAnchors(nil, 10)[0], diagnosis.Warning, "no place keeps a checkpoint")
}

func TestMemoryIsJudged(t *testing.T) {
	want(t, "none", judgeMemory(0), diagnosis.OK, "no control group limits")
	want(t, "much", judgeMemory(256<<20), diagnosis.OK, "256 MiB")
	want(t, "little", judgeMemory(64<<20), diagnosis.Warning, "64 MiB")
}

// issued is a certificate, and what issues others with it.
type issued struct {
	*x509.Certificate
	key *ecdsa.PrivateKey
}

func issue(t *testing.T, by *issued, name string, from, to time.Duration) *issued {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(from), NotAfter: time.Now().Add(to), KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	parent, signer := c, key
	if by != nil {
		parent, signer = by.Certificate, by.key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	c, err = x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &issued{c, key}
}

func TestCertificatesAreJudged(t *testing.T) {
	const month = 30 * 24 * time.Hour
	root := issue(t, nil, "root", -month, 12*month)
	middle, stale := issue(t, root, "middle", -month, 6*month), issue(t, root, "stale", -month, -time.Hour)
	leaf := issue(t, middle, "vault.example.org", -month, 2*month)
	pair := func(all ...*issued) *tls.Certificate {
		c := &tls.Certificate{Leaf: all[0].Certificate}
		for _, one := range all {
			c.Certificate = append(c.Certificate, one.Raw)
		}
		return c
	}
	var d Deployment
	d.Config.PublicURL = "https://vault.example.org"
	for name, tc := range map[string]struct {
		c      *tls.Certificate
		status diagnosis.Status
		words  string
	}{
		"alone":               {pair(leaf), diagnosis.OK, "is valid until"},
		"with its chain":      {pair(leaf, middle, root), diagnosis.OK, "is valid until"},
		"out of order":        {pair(leaf, root, middle), diagnosis.Warning, `"CN=root" in its chain has not issued`},
		"an expired issuer":   {pair(issue(t, stale, "vault.example.org", -month, month), stale), diagnosis.Warning, `"CN=stale" in its chain has expired`},
		"another name":        {pair(issue(t, middle, "other", -month, month)), diagnosis.Warning, "does not name vault.example.org"},
		"expired":             {pair(issue(t, middle, "vault.example.org", -month, -time.Minute)), diagnosis.Failed, "has expired at"},
		"not valid yet":       {pair(issue(t, middle, "vault.example.org", time.Hour, month)), diagnosis.Failed, "is not valid before"},
		"expires in six days": {pair(issue(t, middle, "vault.example.org", -month, 6*24*time.Hour+time.Minute)), diagnosis.Warning, "in 6 days"},
	} {
		want(t, name, d.judgeCertificate("the server's", tc.c, nil), tc.status, tc.words)
	}
}
