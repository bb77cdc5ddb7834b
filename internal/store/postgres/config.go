package postgres

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// These constants bound what a session may take. A replica that stops, or loses its network, while
// it holds the lock on the head keeps the lock for idleLimit; the others wait for it for lockLimit.
// On the client side a read fails after readWait and a step of a commit after commitWait. Both are
// longer than the server needs to report that it gave up. A copy is bounded, because PostgreSQL
// keeps the rows that are deleted meanwhile.
const (
	viewLimit   = 2 * time.Second // how long a View may read
	copyLimit   = time.Hour
	connectWait = 2 * time.Second
	idleLimit   = time.Second
	lockLimit   = 4 * time.Second
	readWait    = 2500 * time.Millisecond
	commitWait  = 5 * time.Second
)

// application is the name of this product's sessions in pg_stat_activity. A writer that has waited
// for lockLimit ends sessions with this name that have held the lock for too long.
const application = "latticekeep"

// purpose is what a session is for.
type purpose int

const (
	writing purpose = iota // the groups of this process
	reading                // Views and rehearsals
	tending                // copies, migrations and VACUUM, which may be slow
)

// parameters returns the settings of a session. The statements are few and simple; each has one
// right plan, and the server keeps it.
func (p purpose) parameters() map[string]string {
	ms := func(d time.Duration) string { return fmt.Sprint(d.Milliseconds()) }
	set := map[string]string{
		"application_name":               application,
		"plan_cache_mode":                "force_generic_plan",
		"enable_seqscan":                 "off",
		"jit":                            "off",
		"client_min_messages":            "warning",
		"default_transaction_deferrable": "off",
		"tcp_keepalives_idle":            "5",
		"tcp_keepalives_interval":        "2",
		"tcp_keepalives_count":           "3",
	}
	switch p {
	case writing:
		set["idle_in_transaction_session_timeout"] = ms(idleLimit)
		set["lock_timeout"] = ms(lockLimit)
		set["statement_timeout"] = ms(lockLimit + time.Second/2)
	case reading:
		set["idle_in_transaction_session_timeout"] = ms(2 * viewLimit)
		set["statement_timeout"] = ms(viewLimit)
	case tending:
		set["idle_in_transaction_session_timeout"] = ms(copyLimit)
		set["statement_timeout"] = "0"
		set["lock_timeout"] = "0"
	}
	return set
}

const urlHint = "give postgres://user@host/database?sslmode=verify-full"

// configure parses the URL. Its errors never repeat it, because it may contain a password.
func configure(text string, pqRequired bool) (*pgconn.Config, error) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" {
		return nil, errors.New("the URL of the database cannot be read: " + urlHint)
	}
	cfg, err := pgconn.ParseConfig(text)
	if err != nil {
		cause := errors.Unwrap(err)
		if cause == nil {
			cause = errors.New("it is not understood")
		}
		message := cause.Error()
		if password, ok := u.User.Password(); ok && password != "" {
			message = strings.ReplaceAll(message, password, "xxxxx")
		}
		return nil, errors.New("the URL of the database: " + message + ": " + urlHint)
	}
	if cfg.RuntimeParams == nil {
		cfg.RuntimeParams = map[string]string{}
	}
	if !names(cfg.RuntimeParams, "search_path") {
		cfg.RuntimeParams["search_path"] = "public"
	}
	dialer := &net.Dialer{
		Timeout:         connectWait,
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 3},
	}
	cfg.DialFunc = dialer.DialContext
	cfg.ConnectTimeout = connectWait
	if err := secure(cfg.Host, &cfg.TLSConfig, pqRequired); err != nil {
		return nil, err
	}
	for _, f := range cfg.Fallbacks {
		if err := secure(f.Host, &f.TLSConfig, pqRequired); err != nil {
			return nil, err
		}
	}
	return cfg, nil
}

// names reports whether the URL sets a parameter. Otherwise the role or the database may set it,
// and a search_path from there would lead to other tables.
func names(params map[string]string, parameter string) bool {
	for name, value := range params {
		if strings.EqualFold(name, parameter) || name == "options" && strings.Contains(strings.ToLower(value), parameter) {
			return true
		}
	}
	return false
}

// secure rejects a host other than this machine if the connection to it would not be encrypted, or
// would not verify the server's certificate.
func secure(host string, config **tls.Config, pqRequired bool) error {
	c := *config
	if local(host) && c == nil {
		return nil
	}
	// pgconn skips Go's own check for verify-ca, and treats require with sslrootcert as verify-ca:
	// it would accept any host that the authority has certified.
	if !local(host) && (c == nil || c.InsecureSkipVerify) {
		return errors.New("the URL of the database: over a network it needs sslmode=verify-full, and sslrootcert, " +
			"the certificates of whoever vouches for the server")
	}
	c = c.Clone()
	c.MinVersion = max(c.MinVersion, tls.VersionTLS12)
	if pqRequired {
		c.MinVersion = tls.VersionTLS13
		c.CurvePreferences = []tls.CurveID{tls.X25519MLKEM768}
	}
	*config = c
	return nil
}

func local(host string) bool {
	if host == "localhost" || strings.HasPrefix(host, "/") || strings.HasPrefix(host, "@") {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}
