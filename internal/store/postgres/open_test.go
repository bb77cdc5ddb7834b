package postgres

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/postgres/address"
	"github.com/latticekeep/latticekeep/test/pgtest"
)

// answers runs statements and returns the first column of the last result.
func answers(t *testing.T, url, statements string) string {
	t.Helper()
	c, err := pgconn.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close(context.Background())
	results, err := c.Exec(t.Context(), statements).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	last := results[len(results)-1]
	if len(last.Rows) == 0 {
		return ""
	}
	return string(last.Rows[0][0])
}

func with(t *testing.T, text, name, value string) string {
	t.Helper()
	u, err := url.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	q := u.Query()
	q.Set(name, value)
	u.RawQuery = q.Encode()
	return u.String()
}

func TestManyMayMigrateAtOnce(t *testing.T) {
	url := pgtest.Shared(t).URL()
	answers(t, url, "CREATE TABLE foreigner (a int); INSERT INTO foreigner VALUES (7)")
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			s, err := Open(t.Context(), url, Options{})
			if err != nil {
				t.Error(err)
				return
			}
			err = s.Update(context.Background(), func(tx store.Tx) error {
				_, err := bump(tx, "n")
				return errors.Join(err, tx.Put(fmt.Appendf(nil, "k%d", i), nil))
			})
			if err := errors.Join(err, s.Close()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := answers(t, url, "SELECT count(*) FROM latticekeep_kv"); got != "9" {
		t.Errorf("%s rows", got)
	}
	if got := answers(t, url, "SELECT a FROM foreigner"); got != "7" {
		t.Errorf("another's table has %s", got)
	}
}

func TestANewerSchemaIsRefused(t *testing.T) {
	url := pgtest.Shared(t).URL()
	s := openAt(t, url, Options{})
	put := func() error {
		return s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("k"), nil) })
	}
	if err := put(); err != nil {
		t.Fatal(err)
	}
	answers(t, url, "UPDATE latticekeep_schema SET version = 99")
	if _, err := Open(t.Context(), url, Options{}); err == nil || !strings.Contains(err.Error(), "newer latticekeep") {
		t.Errorf("opening: %v", err)
	}
	if err := put(); err == nil {
		t.Error("the older program went on to write")
	}
	answers(t, url, "UPDATE latticekeep_schema SET version = 1")
	if err := put(); err != nil {
		t.Error(err)
	}
}

func TestReadingOnlyChangesNothing(t *testing.T) {
	url := pgtest.Shared(t).URL()
	if _, err := Open(t.Context(), url, Options{ReadOnly: true}); err == nil {
		t.Error("an empty database was opened for reading")
	}
	if got := answers(t, url, "SELECT count(*) FROM pg_tables WHERE tablename LIKE 'latticekeep%'"); got != "0" {
		t.Errorf("%s tables were made", got)
	}
	w := openAt(t, url, Options{})
	if err := w.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("k"), []byte("v")) }); err != nil {
		t.Fatal(err)
	}
	s := openAt(t, url, Options{ReadOnly: true})
	if err := s.Update(t.Context(), func(store.Tx) error { return nil }); fault.Of(err) != fault.Internal || err == nil {
		t.Errorf("Update: %v", err)
	}
	err := s.View(t.Context(), func(r store.Reader) error {
		v, err := r.Get([]byte("k"))
		if string(v) != "v" {
			t.Errorf("it reads %q", v)
		}
		return err
	})
	if err = errors.Join(err, s.Ready(t.Context())); err != nil {
		t.Error(err)
	}
}

func TestABadURLIsRefusedWithoutItsPassword(t *testing.T) {
	for text, want := range map[string]string{
		"mysql://u:hunter2@localhost/d":                                      "postgres://",
		"postgres://u:hunter2@local host/d":                                  "postgres://",
		"postgres://u:hunter2@localhost:none/d":                              "postgres://",
		"postgres://u:hunter2@localhost/d?sslmode=hunter2":                   "sslmode",
		"postgres://u:hunter2@db.example.com/d":                              "verify-full",
		"postgres://u:hunter2@db.example.com/d?sslmode=require":              "verify-full",
		"postgres://u:hunter2@192.0.2.1/d?sslmode=disable":                   "verify-full",
		"postgres://u:hunter2@localhost,db.example.com/d?sslmode=prefer":     "verify-full",
		"postgres://u:hunter2@localhost/d?sslrootcert=/none/hunter2":         "CA",
		"postgres://u:hunter2@127.0.0.1:1/d?sslmode=disable":                 "refused",
		"postgres://u:hunter2@localhost:1/d?sslmode=disable&search_path=x,y": "refused",
	} {
		_, err := Open(t.Context(), text, Options{})
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// An operator reads it in a log or a terminal.
func TestAServerThatIsAwayIsToldInOneLine(t *testing.T) {
	_, err := Open(t.Context(), "postgres://vault@127.0.0.1:1,127.0.0.1:2/vault", Options{})
	if err == nil {
		t.Fatal("opened")
	}
	for text, n := range map[string]int{"\n": 0, "\t": 0, "127.0.0.1:1 (127.0.0.1): dial error": 1, "127.0.0.1:2 (127.0.0.1): dial error": 1} {
		if got := strings.Count(err.Error(), text); got != n {
			t.Errorf("%d times %q: %v", got, text, err)
		}
	}
}

func TestOverANetworkOnlyTheHostItselfWillDo(t *testing.T) {
	cert, _ := certificate(t)
	root := filepath.Join(t.TempDir(), "root.crt")
	if err := os.WriteFile(root, cert, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, rootcert := range []string{"", root} {
		for mode, good := range map[string]bool{
			"disable": false, "allow": false, "prefer": false, "require": false, "verify-ca": false, "verify-full": true,
		} {
			text := with(t, "postgres://u@db.example.com/d", "sslmode", mode)
			if rootcert != "" {
				text = with(t, text, "sslrootcert", rootcert)
			}
			if cfg, err := address.Parse(text, connectWait, false); (err == nil) != good || err != nil && !strings.Contains(err.Error(), "verify-full") {
				t.Errorf("%s: %v", text, err)
			} else if good && cfg.TLSConfig.ServerName != "db.example.com" {
				t.Errorf("%s: it would do for %q", text, cfg.TLSConfig.ServerName)
			}
		}
	}
}

func TestARolesSearchPathDivertsNothing(t *testing.T) {
	text := pgtest.Shared(t).URL()
	put := func(text, value string) (before string) {
		t.Helper()
		s := openAt(t, text, Options{})
		err := s.Update(t.Context(), func(tx store.Tx) error {
			v, err := tx.Get([]byte("k"))
			before = string(v)
			return errors.Join(err, tx.Put([]byte("k"), []byte(value)))
		})
		if err != nil {
			t.Fatal(err)
		}
		return before
	}
	put(text, "first")
	u, err := url.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	answers(t, text, "CREATE SCHEMA latticekeep; CREATE SCHEMA other; ALTER ROLE latticekeep IN DATABASE "+u.Path[1:]+" SET search_path = other")
	if got := put(text, "second"); got != "first" {
		t.Errorf("with a search_path of the role it reads %q", got)
	}
	if got := put(with(t, text, "search_path", "other"), "third"); got != "" {
		t.Errorf("with that of the URL it reads %q", got)
	}
	if got := put(with(t, text, "options", "-cSearch_Path=other"), "fourth"); got != "third" {
		t.Errorf("with that of the URL's options it reads %q", got)
	}
}

func TestServersThatWillNotDoAreRefused(t *testing.T) {
	s := pgtest.Start(t)
	refused := func(url, want string) {
		t.Helper()
		_, err := Open(t.Context(), url, Options{})
		if fault.Of(err) != fault.Unavailable || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("want %q: %v", want, err)
		}
	}
	refused(with(t, s.URL(), "default_transaction_read_only", "on"), "takes no writes")
	u, err := url.Parse(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword("latticekeep", "hunter2")
	refused(u.String(), "password authentication failed")
	u, _ = url.Parse(s.URL())
	u.Path = "/absent"
	refused(u.String(), "does not exist")
	reload(t, s, "full_page_writes", "off")
	refused(s.URL(), "torn pages")
	reload(t, s, "fsync", "off")
	refused(s.URL(), "does not sync")
	reload(t, s, "fsync", "on")
	reload(t, s, "full_page_writes", "on")
	s.Configure(t, map[string][]byte{"standby.signal": nil}, "hot_standby = on")
	refused(s.URL(), "standby")
}

// certificate returns a self-signed certificate for 127.0.0.1.
func certificate(t *testing.T) (certificate, key []byte) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "db"}, DNSNames: []string{"localhost"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	kder, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: kder})
}

func TestTLS(t *testing.T) {
	s := pgtest.Start(t)
	cert, key := certificate(t)
	s.Configure(t, map[string][]byte{"server.crt": cert, "server.key": key}, "ssl = on")
	root := filepath.Join(t.TempDir(), "root.crt")
	if err := os.WriteFile(root, cert, 0o600); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	full := with(t, with(t, withHost(t, s.URL(), "localhost:"+u.Port()), "sslmode", "verify-full"), "sslrootcert", root)
	if got := answers(t, full, "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"); got != "t" {
		t.Fatal("the connection is not encrypted")
	}
	openAt(t, full, Options{})
	if _, err := Open(t.Context(), with(t, s.URL(), "sslmode", "verify-full"), Options{}); err == nil {
		t.Error("a certificate that nobody vouches for was accepted")
	}
	// OpenSSL supports X25519MLKEM768 since 3.5; Debian's PostgreSQL 15 uses an older version.
	pq, err := Open(t.Context(), full, Options{PQRequired: true})
	if err != nil {
		if !strings.Contains(err.Error(), "X25519MLKEM768") {
			t.Errorf("with post-quantum key exchange required: %v", err)
		}
		return
	}
	defer pq.Close()
	c, err := pq.server.connect(t.Context(), reading)
	if err != nil {
		t.Fatal(err)
	}
	defer c.kill()
	if state := c.pg.Conn().(*tls.Conn).ConnectionState(); state.CurveID != tls.X25519MLKEM768 {
		t.Errorf("the keys are agreed on by %v", state.CurveID)
	}
}

func TestThePasswordIsAskedForWithEachConnection(t *testing.T) {
	server := pgtest.Start(t)
	u, err := url.Parse(server.URL())
	if err != nil {
		t.Fatal(err)
	}
	password, _ := u.User.Password()
	u.User = url.User("latticekeep")
	var mu sync.Mutex
	s := openAt(t, u.String(), Options{Password: func() (string, error) {
		mu.Lock()
		defer mu.Unlock()
		return password, nil
	}})
	put := func() error {
		return s.Update(t.Context(), func(tx store.Tx) error { return tx.Put([]byte("k"), nil) })
	}
	if err := put(); err != nil {
		t.Fatal(err)
	}
	if err := server.Exec(t.Context(), "ALTER ROLE latticekeep PASSWORD 'another'",
		"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'latticekeep'"); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	password = "another"
	mu.Unlock()
	if err := put(); err != nil {
		t.Error(err)
	}
}

func TestWhatWasDeletedIsVacuumed(t *testing.T) {
	url := pgtest.Shared(t).URL()
	var log bytes.Buffer
	s := openAt(t, url, Options{vacuumAfter: 10 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	count := func() string {
		return answers(t, url, "SELECT pg_stat_force_next_flush(); SELECT vacuum_count || '/' || n_dead_tup FROM pg_stat_user_tables WHERE relname = 'latticekeep_kv'")
	}
	eventually(t, "no vacuum after the start: "+count(), func() bool { return strings.HasPrefix(count(), "1/") })
	err := s.Update(t.Context(), func(tx store.Tx) error {
		for i := range 100 {
			if err := tx.Put(fmt.Appendf(nil, "%d", i), make([]byte, 1000)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Update(t.Context(), func(tx store.Tx) error {
		for i := range 50 {
			if err := tx.Delete(fmt.Appendf(nil, "%d", i)); err != nil {
				return err
			}
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "no vacuum after the deletion: "+log.String(), func() bool { return count() != "1/0" && strings.HasSuffix(count(), "/0") })
}

func TestACopyIsOneCommit(t *testing.T) {
	url := pgtest.Shared(t).URL()
	s := openAt(t, url, Options{Hook: chain})
	l := startLoad(s)
	l.progress(t, 300)
	first := true
	rows := make(map[string][]byte)
	before := l.total()
	err := s.Copy(t.Context(), func(k, v []byte) error {
		if first {
			first = false
			l.progress(t, 100) // commits go on
			if err := s.Copy(t.Context(), func(_, _ []byte) error { return nil }); fault.Of(err) != fault.Conflict {
				t.Errorf("a second copy: %v", err)
			}
		}
		rows[string(k)] = v
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	common, head := number8(rows["common"]), number8(rows["head"])
	if common != head || common < before || rows[fmt.Sprintf("entry/%08d", head)] == nil || rows[fmt.Sprintf("entry/%08d", head+1)] != nil {
		t.Errorf("the copy has %d updates and %d entries, %d were acknowledged before it", common, head, before)
	}
	boom := errors.New("boom")
	if err := s.Copy(t.Context(), func(_, _ []byte) error { return boom }); !errors.Is(err, boom) {
		t.Errorf("the error of emit became %v", err)
	}
	l.check(t)
}

func number8(b []byte) uint64 { return binary.BigEndian.Uint64(b) }
