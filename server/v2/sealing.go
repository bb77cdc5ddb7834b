package v2

import (
	"context"

	"github.com/latticekeep/latticekeep/internal/authz"
)

// sealingKey answers the document as it was signed: a field beside it would
// make it another document, and the answer can be kept as a key file.
func (a *API) sealingKey(ctx context.Context, _ authz.Principal, _ input) (any, error) {
	return a.Keys.SealingDocument(ctx)
}
