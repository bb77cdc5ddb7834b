package audit

import (
	"context"
	"sync/atomic"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/store"
)

// Chain reads the log of one deployment from the store and verifies it with the log's key. It
// writes nothing. Its only state is a cache of the rows that it read last.
type Chain struct {
	store   store.Store
	key     *dualsig.PublicKey
	chainID string

	bases      baseCache
	epochsRead atomic.Pointer[readEpochs] // nil before the second epoch
	followed   atomic.Pointer[followed]   // nil before this process has seen a checkpoint
}

// verifiedHead returns the stored head after comparing it with the last entry and verifying that
// entry's signature.
func (ch *Chain) verifiedHead(ctx context.Context) (head Head, err error) {
	var last *Entry
	err = ch.store.View(ctx, func(r store.Reader) error {
		if head.link, err = readHead(r); err != nil {
			return err
		}
		newest, err := newestEntry(r)
		if err == nil && newest > 0 {
			last, err = readEntry(r, newest)
		}
		if err == nil {
			head.epoch, err = ch.epochNow(r, head.link)
		}
		return err
	})
	switch {
	case err != nil:
		return Head{}, err
	case last == nil && head.link == link{}:
		return head, nil
	case last == nil || last.link() != head.link || !last.verify(ch.key, nil):
		return Head{}, errDamagedLog
	}
	return head, nil
}
