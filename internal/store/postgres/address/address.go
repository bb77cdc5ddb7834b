// Package address reads the URL of a PostgreSQL database. It opens no connection.
package address

import (
	"crypto/tls"
	"errors"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

const urlHint = "give postgres://user@host/database?sslmode=verify-full"

// Parse returns the settings of a connection to the database at a URL, postgres://user@host/database
// with the parameters of libpq. timeout bounds the attempt to connect. pqRequired allows only
// X25519MLKEM768 for the exchange of keys, wherever TLS is used. Parse refuses a host other than
// this machine if the connection would not be encrypted, or would not verify the server's
// certificate. Its errors never repeat the URL, because it may contain a password.
func Parse(text string, timeout time.Duration, pqRequired bool) (*pgconn.Config, error) {
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
		Timeout:         timeout,
		KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 5 * time.Second, Interval: 2 * time.Second, Count: 3},
	}
	cfg.DialFunc = dialer.DialContext
	cfg.ConnectTimeout = timeout
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
