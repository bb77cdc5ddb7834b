package postgres

import (
	"fmt"
	"sync"
	"testing"

	"github.com/latticekeep/latticekeep/internal/store"
	"github.com/latticekeep/latticekeep/test/pgtest"
	"github.com/latticekeep/latticekeep/test/storetest"
)

func TestConformance(t *testing.T) {
	url := pgtest.Shared(t).URL()
	var mu sync.Mutex
	urls := map[string]string{} // URL of each folder that the suite uses; a schema is created faster than a database
	storetest.Run(t, func(t *testing.T, o storetest.Options) store.Store {
		opts := Options{Hook: o.Hook, Observer: o.Observer, Now: o.Now}
		if o.Commit != nil {
			opts.fault = func(_ string, do func() error) error { return o.Commit(do) }
		}
		mu.Lock()
		defer mu.Unlock()
		if urls[o.Dir] == "" {
			schema := fmt.Sprintf("folder%d", len(urls))
			answers(t, url, "CREATE SCHEMA "+schema)
			urls[o.Dir] = with(t, url, "search_path", schema)
		}
		s, err := Open(t.Context(), urls[o.Dir], opts)
		if err != nil {
			t.Fatal(err)
		}
		return s
	})
}
