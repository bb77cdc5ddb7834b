// Package kmsplugin is a KMS v2 provider for kube-apiserver: it wraps the seeds from which the API
// server derives the keys of what it writes to etcd.
//
// Each control-plane node runs one plugin, with files in a directory of its own. The key set is
// one signed file, the same on all nodes. It names the nodes, and has generations: an ML-KEM key pair
// and a secret, wrapped by a KMS key. One generation is current and wraps; all open. The node's
// identity is an ML-DSA-65 key, wrapped as well. The record says which key set the plugin has loaded
// last.
//
// A new generation is pending first. It becomes the current one when each node has signed that its
// plugin has loaded it ([Acknowledge], [Promote]), so no node meets a seed that it cannot open.
//
// What must stay true:
//   - the plugin does not depend on the cluster that it serves: it needs its files, and the KMS at
//     the start and for each new generation; everything else is in memory, until the process ends;
//   - what Status names is what Encrypt uses: both read one pointer;
//   - a key set that is older than the record, or another one, is refused, and so is one that does
//     not name this node;
//   - a key id is never used twice, because it has a number that only rises, and a hash of the keys;
//   - nothing but the owner of the socket can connect to it;
//   - one plugin at most serves from a directory, so the record is that of the plugin that serves;
//   - a generation leaves the key set when no object in etcd names it ([Retire]);
//   - a seed that is wrapped or opened is in the node's log, on disk, before the API server has the answer;
//     when the log takes no entry, or not within a second, the plugin serves on, and the entry is written
//     later or counted in another one, unless [Config] says to refuse;
//   - the plugin serves without its log: neither the start nor the end depends on its disk, and Status
//     never waits for it.
//
// The package does not distribute files.
package kmsplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	kmsapi "k8s.io/kms/apis/v2"

	"github.com/latticekeep/latticekeep/internal/nodelog"
	"github.com/latticekeep/latticekeep/internal/socket"
)

const (
	// maxMessage is above what kube-apiserver sends: 1 kB of ciphertext and 32 kB of annotations.
	maxMessage = 64 << 10
	// maxStreams bounds the calls of one connection that run at the same time. kube-apiserver has one
	// connection.
	maxStreams = 1000

	connectTimeout = 10 * time.Second
)

// Config configures [Serve].
type Config struct {
	Dir    string // required: the directory of the key set
	Socket string // required: path of the socket
	Logger *slog.Logger

	TokenFile string        // holds the token for Vault and OpenBao
	Poll      time.Duration // how often to look for another key set; default 2 s

	RequireLog bool // refuse seeds while the node's log takes no entries
	LogEntries int  // entries of the node's log on disk; default 10,000
}

type plugin struct {
	dir        string
	custody    Custody
	logger     *slog.Logger
	log        *recorder
	requireLog bool
	keys       atomic.Pointer[keys]
	refused    string // why the file as it is now is not served and recorded; "": it is
}

// Serve serves at the socket until ctx ends. It fails when the socket or the key set cannot be used.
func Serve(ctx context.Context, c Config) error {
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Poll == 0 {
		c.Poll = 2 * time.Second
	}
	alone, err := claimDir(c.Dir)
	if err != nil {
		return err
	}
	s, err := socket.Claim(c.Socket)
	if err != nil {
		_ = alone.Close() // it was not written to
		return err
	}
	p := &plugin{dir: c.Dir, custody: Custody{TokenFile: c.TokenFile, Logger: c.Logger}, logger: c.Logger}
	err = p.serve(ctx, s, c)
	p.log.afterEnd(func() { _ = alone.Close() })
	p.custody.Close()
	if released := s.Release(); err == nil {
		err = released
	}
	return err
}

func (p *plugin) serve(ctx context.Context, s *socket.Socket, c Config) error {
	seen := p.look()
	first, err := load(ctx, &p.custody, p.dir, nil)
	if err != nil {
		return err
	}
	// The node's key is the same one as long as the plugin serves, whichever KMS key wraps it.
	key, err := p.custody.openNodeKey(ctx, p.dir, first.set)
	if err != nil {
		return err
	}
	if err := p.serveKeys(first); err != nil {
		return err
	}
	l, err := s.Listen()
	if err != nil {
		return err
	}
	p.requireLog = c.RequireLog
	p.log = startRecorder(p.dir, key, nodelog.Options{Limit: c.LogEntries, Required: c.RequireLog, Logger: p.logger})
	defer p.log.end()
	server := grpc.NewServer(grpc.MaxRecvMsgSize(maxMessage), grpc.MaxSendMsgSize(maxMessage), grpc.MaxHeaderListSize(16<<10),
		grpc.MaxConcurrentStreams(maxStreams), grpc.ConnectionTimeout(connectTimeout))
	kmsapi.RegisterKeyManagementServiceServer(server, service{p: p})
	p.logger.Info("serving", "socket", s.Path, "key_set", first.set.ID, "revision", first.set.Revision, "key_id", first.set.current().KeyID)

	ended := make(chan error, 1) // capacity 1: nobody may receive
	go func() { ended <- server.Serve(l) }()
	ticker := time.NewTicker(c.Poll)
	defer ticker.Stop()
	for {
		select {
		case err := <-ended:
			return fmt.Errorf("serving: %w", err)
		case <-ctx.Done():
			end(server)
			err := <-ended
			if errors.Is(err, grpc.ErrServerStopped) { // before it had begun
				err = nil
			}
			p.logger.Info("ended")
			return err
		case <-ticker.C:
			if now := p.look(); !same(now, seen) || p.refused != "" {
				seen = now
				p.reload(ctx)
			}
		}
	}
}

// serveKeys has calls answered with other keys, and then records them.
func (p *plugin) serveKeys(k *keys) error {
	p.keys.Store(k)
	return newRecord(k.set, k.digest).write(p.dir)
}

// end waits for the calls that run, for a while.
func end(server *grpc.Server) {
	hurry := time.AfterFunc(endTimeout, server.Stop)
	defer hurry.Stop()
	server.GracefulStop()
}

// look returns nil when there is no file, and reload finds out why.
func (p *plugin) look() fs.FileInfo {
	info, err := os.Stat(filepath.Join(p.dir, keySetFile))
	if err != nil {
		return nil
	}
	return info
}

// same reports whether nothing was written between two looks at a file.
func same(a, b fs.FileInfo) bool {
	if a == nil || b == nil {
		return a == nil && b == nil
	}
	return os.SameFile(a, b) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}

// reload serves the key set of the file. If it cannot, the previous one serves on, and Status stays
// healthy: otherwise the API server would not be ready, and stop writing, because of a file that was
// copied badly.
func (p *plugin) reload(ctx context.Context) {
	served := p.keys.Load()
	next, err := load(ctx, &p.custody, p.dir, served)
	if err != nil {
		p.report("the key set file is refused; the previous revision serves on", served, err)
		return
	}
	if err := p.serveKeys(next); err != nil {
		p.report("the key set is served and cannot be recorded; retrying", next, err)
		return
	}
	p.refused = ""
	p.logger.Info("key set loaded", "key_set", next.set.ID, "revision", next.set.Revision, "key_id", next.set.current().KeyID)
}

// report logs why a key set file is not served and recorded, once and not with each look.
func (p *plugin) report(what string, serving *keys, err error) {
	if text := err.Error(); text != p.refused {
		p.refused = text
		p.logger.Error(what, "revision", serving.set.Revision, "error", err)
	}
}
