package keyring

import (
	"context"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/store"
)

// Made reports whether a store holds a deployment.
func Made(ctx context.Context, s store.Store) (made bool, err error) {
	err = s.View(ctx, func(r store.Reader) error {
		b, err := r.Get(deploymentRow)
		made = b != nil
		return err
	})
	if err != nil {
		return false, fmt.Errorf("looking for a deployment: %w", err)
	}
	return made, nil
}
