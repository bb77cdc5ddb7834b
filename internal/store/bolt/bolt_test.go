package bolt

import (
	"path/filepath"
	"testing"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/internal/store/storetest"
)

func TestConformance(t *testing.T) {
	storetest.Run(t, func(t *testing.T, o storetest.Options) store.Store {
		opts := Options{Hook: o.Hook, Now: o.Now}
		if o.Commit != nil {
			opts.fault = func(step string, do func() error) error {
				if step == "commit" {
					return o.Commit(do)
				}
				return do()
			}
		}
		s, err := Open(filepath.Join(o.Dir, "db"), opts)
		if err != nil {
			t.Fatal(err)
		}
		return s
	})
}
