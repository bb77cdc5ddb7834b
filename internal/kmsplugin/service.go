package kmsplugin

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	kmsapi "k8s.io/kms/apis/v2"

	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/nodelog"
)

// annotation is the one annotation of a wrapped seed: the ML-KEM ciphertext.
const annotation = "kem.latticekeep.dev"

// keys is a key set with the keys of all its generations. It does not change.
type keys struct {
	set    *KeySet
	digest string // as in the record
	byID   map[string]*envelope.EtcdKey
}

// load opens the key set in dir. It takes the keys of generations that served has.
func load(ctx context.Context, c *Custody, dir string, served *keys) (*keys, error) {
	s, file, err := readKeySet(dir)
	if err != nil {
		return nil, err
	}
	if _, err := readIdentity(dir, s); err != nil {
		return nil, err
	}
	k := &keys{set: s, digest: digestOf(file), byID: map[string]*envelope.EtcdKey{}}
	for _, g := range s.Generations {
		key := served.opened(s.ID, g)
		if key == nil {
			if key, err = c.openGeneration(ctx, s.ID, g); err != nil {
				return nil, err
			}
		}
		k.byID[g.KeyID] = key
	}
	return k, nil
}

// opened returns the key of a generation if its secrets are those of k.
func (k *keys) opened(keySet string, g Generation) *envelope.EtcdKey {
	if k == nil || k.set.ID != keySet {
		return nil
	}
	for _, have := range k.set.Generations {
		if have.KeyID == g.KeyID && string(have.Wrapped) == string(g.Wrapped) {
			return k.byID[g.KeyID]
		}
	}
	return nil
}

// service answers kube-apiserver. It needs no network.
type service struct {
	kmsapi.UnimplementedKeyManagementServiceServer
	p *plugin
}

// Status implements the interface of KMS v2.
func (s service) Status(context.Context, *kmsapi.StatusRequest) (*kmsapi.StatusResponse, error) {
	k := s.p.keys.Load()
	return &kmsapi.StatusResponse{Version: "v2", Healthz: "ok", KeyId: k.set.current().KeyID}, nil
}

// Encrypt implements the interface of KMS v2.
func (s service) Encrypt(ctx context.Context, r *kmsapi.EncryptRequest) (*kmsapi.EncryptResponse, error) {
	defer clear(r.GetPlaintext())
	if n := len(r.GetPlaintext()); n == 0 || n > envelope.MaxEtcdSeed {
		return nil, status.Errorf(codes.InvalidArgument, "plaintext has %d bytes: it must have 1 to %d", n, envelope.MaxEtcdSeed)
	}
	k := s.p.keys.Load()
	id := k.set.current().KeyID
	ciphertext, encapsulated, err := k.byID[id].Wrap(id, r.GetPlaintext())
	if err != nil {
		return nil, s.p.failed(codes.Internal, "wrapping a seed failed", id, err)
	}
	if err := s.p.record(ctx, nodelog.Wrapped, id, ciphertext); err != nil {
		return nil, err
	}
	return &kmsapi.EncryptResponse{Ciphertext: ciphertext, KeyId: id, Annotations: map[string][]byte{annotation: encapsulated}}, nil
}

// Decrypt implements the interface of KMS v2.
func (s service) Decrypt(ctx context.Context, r *kmsapi.DecryptRequest) (*kmsapi.DecryptResponse, error) {
	k, id := s.p.keys.Load(), r.GetKeyId()
	key := k.byID[id]
	if key == nil {
		err := fmt.Errorf("the key set has no such generation at revision %d: copy the newest %s to this node", k.set.Revision, keySetFile)
		return nil, s.p.failed(codes.FailedPrecondition, "a seed was refused", id, err)
	}
	encapsulated, ok := r.GetAnnotations()[annotation]
	if !ok || len(r.GetAnnotations()) != 1 {
		return nil, s.p.failed(codes.InvalidArgument, "a seed was refused", id, errors.New("it must have the annotation "+annotation+" and no other"))
	}
	seed, err := key.Open(id, r.GetCiphertext(), encapsulated)
	if err != nil {
		return nil, s.p.failed(codes.InvalidArgument, "a seed was refused", id, err)
	}
	if err := s.p.record(ctx, nodelog.Opened, id, r.GetCiphertext()); err != nil {
		clear(seed)
		return nil, err
	}
	return &kmsapi.DecryptResponse{Plaintext: seed}, nil
}

// record enters a seed into the node's log. A seed that is refused has no entry, because whoever writes
// to etcd could fill the log with them.
func (p *plugin) record(ctx context.Context, kind nodelog.Kind, keyID string, ciphertext []byte) error {
	err := p.log.record(ctx, kind, keyID, ciphertext)
	switch {
	case err == nil || !p.requireLog:
		return nil
	case errors.Is(err, nodelog.ErrFull):
		return p.failed(codes.ResourceExhausted, "a seed was refused, because --require-log is set", keyID, err)
	}
	return p.failed(codes.Unavailable, "a seed was refused, because --require-log is set", keyID, err)
}

// failed logs an error and returns it for kube-apiserver, which logs it too. Anybody who writes to
// etcd chooses the key id.
func (p *plugin) failed(code codes.Code, what, keyID string, err error) error {
	keyID = keyID[:min(len(keyID), 90)]
	p.logger.Warn(what, "key_id", keyID, "error", err)
	return status.Errorf(code, "%s: key id %q: %v", what, keyID, err)
}
