package kmsplugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/nodelog"
)

const (
	// maxWaiting bounds the entries that wait for the log.
	maxWaiting = 256
	// endTimeout limits how long the end waits for calls that run, and then for the log.
	endTimeout = 5 * time.Second
)

// patience is how long a call waits for its entry. Tests have more of it, because their disk is busy.
var patience = time.Second

var errLate = errors.New("the log of this node does not answer in time: see that its disk does")

// recorder stands between the calls and the node's log, because a disk may hang. One goroutine alone uses
// the log, and a call waits for it for a while at most. An entry that is late is written all the same.
type recorder struct {
	required bool
	logger   *slog.Logger
	queue    chan recording
	ending   chan struct{}
	ended    chan struct{}

	dropped   atomic.Uint64 // seeds that found the queue full, and that the log does not know of yet
	unwritten atomic.Int64  // seeds that were wrapped or opened, and that no entry on disk has or counts
	late      atomic.Bool   // it was logged that calls do not wait
}

// recording is a seed that waits for its entry.
type recording struct {
	kind       nodelog.Kind
	keyID      string
	ciphertext []byte
	until      time.Time // when the call stops waiting
	result     chan error
}

// startRecorder does not wait until the log is open.
func startRecorder(dir string, key *dualsig.PrivateKey, o nodelog.Options) *recorder {
	r := &recorder{required: o.Required, logger: o.Logger, queue: make(chan recording, maxWaiting), ending: make(chan struct{}), ended: make(chan struct{})}
	go func() {
		defer close(r.ended)
		r.write(nodelog.Open(dir, key, o))
	}()
	return r
}

// record has a seed entered into the log. An error says that this did not happen, or has not happened yet.
func (r *recorder) record(ctx context.Context, kind nodelog.Kind, keyID string, ciphertext []byte) error {
	wait := patience
	if deadline, ok := ctx.Deadline(); ok {
		// The other half is for the answer.
		wait = min(wait, time.Until(deadline)/2)
	}
	// The result has capacity 1, so the writer never waits for a call.
	x := recording{kind, keyID, ciphertext, time.Now().Add(wait), make(chan error, 1)}
	r.unwritten.Add(1)
	select {
	case r.queue <- x:
	default:
		r.drop()
		return r.warn()
	}
	late := time.NewTimer(wait)
	defer late.Stop()
	select {
	case err := <-x.result:
		return err
	case <-ctx.Done():
		return ctx.Err()
	case <-late.C:
		return r.warn()
	}
}

// drop counts a seed that found the queue full. One that is refused needs no entry.
func (r *recorder) drop() {
	if r.required {
		r.unwritten.Add(-1)
	} else {
		r.dropped.Add(1)
	}
}

// warn logs that calls do not wait, once.
func (r *recorder) warn() error {
	if !r.late.Swap(true) {
		r.logger.Warn("this node's log does not answer in time", "refusing", r.required, "error", errLate)
	}
	return errLate
}

// write writes entries until the end.
func (r *recorder) write(l *nodelog.Log) {
	var behind int64 // seeds that the log knows of and has not written
	for {
		select {
		case x := <-r.queue:
			behind += r.handOver(l) + 1
			err := l.Append(x.kind, x.keyID, x.ciphertext)
			if err == nil || r.required {
				r.unwritten.Add(-behind)
				behind = 0
			}
			x.result <- err
			if time.Now().Before(x.until) && r.late.Swap(false) {
				r.logger.Info("this node's log answers in time again")
			}
		case <-r.ending:
			if len(r.queue) > 0 {
				continue
			}
			r.handOver(l)
			l.Close()
			return
		}
	}
}

// handOver tells the log how many seeds found the queue full.
func (r *recorder) handOver(l *nodelog.Log) int64 {
	n := r.dropped.Swap(0)
	l.Drop(n)
	return int64(n)
}

// end waits until all entries are written and the log is closed, for a while.
func (r *recorder) end() {
	close(r.ending)
	late := time.NewTimer(endTimeout)
	defer late.Stop()
	select {
	case <-r.ended:
	case <-late.C:
		r.logger.Error("the end does not wait for this node's log, which does not answer: entries were not written", "entries", r.unwritten.Load())
	}
}

// afterEnd calls f when nothing is written any more, which may be never. A recorder that is nil has
// written nothing.
func (r *recorder) afterEnd(f func()) {
	if r == nil {
		f()
		return
	}
	select {
	case <-r.ended:
		f()
	default:
		go func() {
			<-r.ended
			f()
		}()
	}
}

// LogSummary is what the log of a node has, and whose it is. Whether the key set is the right one, the
// reader must know: its id is the fingerprint of the key that signs it.
type LogSummary struct {
	KeySet   string `json:"key_set"` // id
	NodeName string `json:"node_name"`
	nodelog.Summary
}

// ReadNode returns the key set in dir, and this node, which the key set names. It does not need the KMS.
func ReadNode(dir string) (*KeySet, Node, error) {
	s, _, err := readKeySet(dir)
	if err != nil {
		return nil, Node{}, err
	}
	i, err := readIdentity(dir, s)
	return s, i.Node, err
}

// VerifyLog verifies the log of this node in dir.
func VerifyLog(dir string) (LogSummary, error) {
	s, n, err := ReadNode(dir)
	if err != nil {
		return LogSummary{}, err
	}
	key, err := dualsig.ParsePublicKey(n.PublicKey)
	if err != nil {
		return LogSummary{}, err
	}
	sum, err := nodelog.VerifyFolder(dir, key)
	if err == nil && sum.Count() == 0 {
		err = fmt.Errorf("the log of node %s has no entry in %s: see that its plugin has served", n.Name, nodelog.Folder(dir, key.ID()))
	}
	return LogSummary{s.ID, n.Name, sum}, err
}

// VerifyLogFiles verifies files of a node's log, in the order of their entries. The key set is the content
// of the key set file, which names the node.
func VerifyLogFiles(keySet []byte, paths []string) (LogSummary, error) {
	s, err := ParseKeySet(keySet)
	if err != nil {
		return LogSummary{}, err
	}
	if len(paths) == 0 {
		return LogSummary{}, errors.New("no file of a log was given")
	}
	id, err := nodelog.NodeOf(paths[0])
	if err != nil {
		return LogSummary{}, err
	}
	for _, n := range s.Nodes {
		key, err := dualsig.ParsePublicKey(n.PublicKey)
		if err != nil {
			return LogSummary{}, err
		}
		if key.ID() == id {
			sum, err := nodelog.Verify(key, paths)
			return LogSummary{s.ID, n.Name, sum}, err
		}
	}
	return LogSummary{}, fmt.Errorf("%s is of the node key %s, which the key set does not name: give a key set that does, such as an earlier one", paths[0], id)
}
