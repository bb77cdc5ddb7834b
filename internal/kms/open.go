package kms

import (
	"context"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net/url"
	"strings"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// Options of [Open]. Zero fields take the defaults.
type Options struct {
	TokenFile  string         // holds the token for Vault and OpenBao, read for every call; default VAULT_SERVER_TOKEN or VAULT_TOKEN
	PQRequired bool           // refuse a key exchange with the service other than X25519MLKEM768
	RootCAs    *x509.CertPool // authorities of the service's certificate; default those of the provider's environment and the system
	Logger     *slog.Logger   // told of calls that are tried again; default none
}

// Open finds the wrapping key that a URL names and sees that it is fit:
//
//	file:///path/of/the/key/file
//	awskms:///KEY?region=REGION
//	gcpkms://projects/P/locations/L/keyRings/R/cryptoKeys/K
//	hashivault://NAME?engine=transit
//
// It tries for ten seconds at most. Errors: fault.Invalid for a URL, a key or a
// permission that does not serve, with the remedy; fault.Unavailable for a
// service that cannot be reached.
func Open(ctx context.Context, text string, o Options) (*Key, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	u, err := url.Parse(text)
	if err != nil { // wrapping err would repeat the text
		return nil, fault.New(fault.Invalid, "the URL of the KMS key cannot be read")
	}
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	var k *Key
	switch u.Scheme {
	case "file":
		if u.Host != "" || !strings.HasPrefix(u.Path, "/") || u.RawQuery != "" {
			return nil, fault.New(fault.Invalid, "give the whole path of the KMS key file: file:///etc/latticekeep/kms.key")
		}
		return OpenLocal(u.Path)
	case "awskms":
		k, err = openAWS(ctx, u, o)
	case "gcpkms":
		k, err = openGCP(ctx, u, o)
	case "hashivault":
		k, err = openVault(ctx, u, o)
	case "azurekeyvault":
		return nil, fault.New(fault.Invalid, "azurekeyvault wraps with RSA, which a quantum computer opens: use another key-management service, or a key file")
	default:
		return nil, fault.New(fault.Invalid, "the KMS key is named by file:///path, awskms://…, gcpkms://… or hashivault://…")
	}
	if err != nil {
		return nil, fmt.Errorf("opening the KMS key: %w", err)
	}
	if _, err := parseWrapped(wrapped{k.id, make([]byte, 1)}.marshal()); err != nil { // or nothing that it wraps could be read
		_ = k.Close()
		return nil, unfit("the id of the KMS key is too long, or has other characters than those of ASCII that can be seen: %q", k.id)
	}
	k.logger = o.Logger
	return k, nil
}
