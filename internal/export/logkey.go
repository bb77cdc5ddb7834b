package export

import (
	"cmp"
	"context"
	"encoding/base64"
	"fmt"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/dualsig"
)

// LogKey is the public key that, according to the server, signs its log.
type LogKey struct {
	chainID string
	Public  *dualsig.PublicKey
}

func (k LogKey) Fingerprint() string { return audit.Fingerprint(k.chainID, k.Public.Bytes()) }

func FetchLogKey(ctx context.Context, c *client.V2) (LogKey, error) {
	answer, err := c.GetAuditPublicKey(ctx)
	if err != nil {
		return LogKey{}, fmt.Errorf("reading the log's public key: %w", err)
	}
	raw, err1 := base64.RawURLEncoding.DecodeString(answer.Key.Pub)
	public, err2 := dualsig.ParsePublicKey(raw)
	if err := cmp.Or(err1, err2); err != nil {
		return LogKey{}, fmt.Errorf("reading the log's public key: %w", err)
	}
	return LogKey{answer.ChainId, public}, nil
}

// KeyIn returns the key that an entry names. The first entry of the log and of each tenant names
// it.
func KeyIn(e *audit.Entry) (LogKey, bool) {
	if e == nil || e.Attributes["chain_id"] == "" {
		return LogKey{}, false
	}
	text := e.Attributes["public_key"]
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil || base64.StdEncoding.EncodeToString(raw) != text { // only the canonical encoding is valid
		return LogKey{}, false
	}
	public, err := dualsig.ParsePublicKey(raw)
	return LogKey{e.Attributes["chain_id"], public}, err == nil
}

// IsTenants reports whether an export that begins with this entry is that of one tenant. A tenant's
// first entry is never the first entry of the log, which belongs to the system tenant.
func IsTenants(first *audit.Entry) bool {
	_, named := KeyIn(first)
	return named && first.Sequence > 1 && first.TenantSequence == 1
}

func errAnotherLog(sequence uint64) error {
	return &audit.Broken{Sequence: sequence, Reason: "the chain's fingerprint is not the pinned one: this is another log"}
}
