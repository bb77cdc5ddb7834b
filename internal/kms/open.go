package kms

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"strings"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// Open opens the key-encryption key that a URL names, and checks that it is suitable:
//
//	file:///path/of/the/key/file
//	awskms:///KEY?region=REGION
//	gcpkms://projects/P/locations/L/keyRings/R/cryptoKeys/K
//	hashivault://NAME?engine=transit
//
// It tries for at most ten seconds. Errors: fault.Invalid, with the remedy, for a URL, a key or a
// permission that cannot work; fault.Unavailable for a service that cannot be reached.
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
	if _, err := parseWrapped(wrapped{k.id, make([]byte, 1)}.marshal()); err != nil { // otherwise nothing that the key wraps could be read
		_ = k.Close()
		return nil, unfit("the id of the KMS key is too long, or has other characters than those of ASCII that can be seen: %q", k.id)
	}
	k.logger = o.Logger
	return k, nil
}
