package kmstest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"cloud.google.com/go/kms/apiv1/kmspb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// gcpRing is where the keys are.
const gcpRing = "projects/test/locations/europe-west1/keyRings/latticekeep/cryptoKeys/"

// NewGCP starts a server that speaks the gRPC API of Google Cloud KMS. With TLS it wants credentials, as Google's does; without, where a
// client sends none, it does not.
func NewGCP(options ...Option) (*Server, error) {
	s, err := listen(options)
	if err != nil {
		return nil, err
	}
	connections := &connections{Listener: s.listener, open: make(map[net.Conn]bool)}
	server := grpc.NewServer(grpc.UnaryInterceptor(func(ctx context.Context, in any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		return s.google(ctx, in, info.FullMethod, handler, connections)
	}))
	kmspb.RegisterKeyManagementServiceServer(server, google{server: s})
	s.stop = server.Stop
	s.url = func(name string) string {
		return "gcpkms://" + gcpRing + name + "?endpoint=" + url.QueryEscape(s.base())
	}
	s.env = func() []string { return nil }
	s.AddKey(DefaultKey, "")
	go func() { _ = server.Serve(connections) }()
	return s, nil
}

// connections remembers what it accepted, to drop it.
type connections struct {
	net.Listener
	mu   sync.Mutex
	open map[net.Conn]bool
}

func (c *connections) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open[conn] = true
	return conn, nil
}

func (c *connections) drop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for conn := range c.open {
		_ = conn.Close()
	}
	clear(c.open)
}

// google is what befalls every call.
func (s *Server) google(ctx context.Context, in any, method string, handler grpc.UnaryHandler, c *connections) (any, error) {
	name := method[strings.LastIndexByte(method, '/')+1:]
	operation := strings.ToLower(name)
	switch name {
	case "GetCryptoKey":
		operation = "describe"
	case "DestroyCryptoKeyVersion":
		operation = "delete"
	}
	done, err := s.befall(ctx, operation)
	defer done()
	resource := ""
	switch r := in.(type) {
	case interface{ GetName() string }:
		resource = "name=" + url.QueryEscape(r.GetName())
	case interface{ GetParent() string }:
		resource = "parent=" + url.QueryEscape(r.GetParent())
	}
	md, _ := metadata.FromIncomingContext(ctx)
	switch {
	case errors.Is(err, errDropped):
		c.drop()
		return nil, status.Error(codes.Unavailable, "dropped")
	case errors.Is(err, errThrottled):
		return nil, status.Error(codes.ResourceExhausted, "Quota exceeded for quota metric 'Cryptographic requests' and limit 'Cryptographic requests per minute'")
	case errors.Is(err, errFailing):
		return nil, status.Error(codes.Internal, "Internal error encountered.")
	case errors.Is(err, errForbidden):
		return nil, status.Errorf(codes.PermissionDenied, "Permission 'cloudkms.%s' denied on resource (or it may not exist).", name)
	case !slices.Contains(md.Get("x-goog-request-params"), resource):
		return nil, status.Error(codes.InvalidArgument, "x-goog-request-params does not route "+resource)
	case s.tls != nil && !strings.HasPrefix(strings.Join(md.Get("authorization"), ""), "Bearer "):
		return nil, status.Error(codes.Unauthenticated, "Request is missing required authentication credential.")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return handler(ctx, in)
}

// google answers the calls. They come under mu.
type google struct {
	kmspb.UnimplementedKeyManagementServiceServer
	server *Server
}

func (g google) find(name string) (*key, error) {
	k := g.server.keys[strings.TrimPrefix(name, gcpRing)]
	if k == nil || !strings.HasPrefix(name, gcpRing) {
		return nil, status.Errorf(codes.NotFound, "CryptoKey %s not found.", name)
	}
	return k, nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(b []byte) *wrapperspb.Int64Value {
	return wrapperspb.Int64(int64(crc32.Checksum(b, castagnoli)))
}

// Encrypt implements kmspb.KeyManagementServiceServer.
func (g google) Encrypt(_ context.Context, in *kmspb.EncryptRequest) (*kmspb.EncryptResponse, error) {
	k, err := g.find(in.GetName())
	switch {
	case err != nil:
		return nil, err
	case k.kind != "":
		return nil, status.Error(codes.InvalidArgument, "CryptoKey purpose is not ENCRYPT_DECRYPT.")
	case k.state(k.latest) != kmspb.CryptoKeyVersion_ENABLED:
		return nil, status.Errorf(codes.FailedPrecondition, "%s is not enabled, current state is: %s.", k.versionName(k.latest), k.state(k.latest))
	case len(in.GetPlaintext()) > 64<<10:
		return nil, status.Error(codes.InvalidArgument, "The plaintext is too long.")
	case in.GetPlaintextCrc32C() != nil && in.GetPlaintextCrc32C().GetValue() != checksum(in.GetPlaintext()).GetValue():
		return nil, status.Error(codes.InvalidArgument, "The checksum in field plaintext_crc32c did not match the data in field plaintext.")
	}
	sealed := newAEAD(k.versions[k.latest]).Seal(binary.BigEndian.AppendUint32(nil, uint32(k.latest)), nil, in.GetPlaintext(), in.GetAdditionalAuthenticatedData())
	return &kmspb.EncryptResponse{
		Name: k.versionName(k.latest), Ciphertext: sealed, CiphertextCrc32C: checksum(sealed),
		VerifiedPlaintextCrc32C: in.GetPlaintextCrc32C() != nil, ProtectionLevel: kmspb.ProtectionLevel_SOFTWARE,
	}, nil
}

// Decrypt implements kmspb.KeyManagementServiceServer.
func (g google) Decrypt(_ context.Context, in *kmspb.DecryptRequest) (*kmspb.DecryptResponse, error) {
	k, err := g.find(in.GetName())
	invalid := status.Error(codes.InvalidArgument, "Decryption failed: the ciphertext is invalid.")
	switch {
	case err != nil:
		return nil, err
	case k.kind != "":
		return nil, status.Error(codes.InvalidArgument, "CryptoKey purpose is not ENCRYPT_DECRYPT.")
	case len(in.GetCiphertext()) < 4:
		return nil, invalid
	}
	version := int(binary.BigEndian.Uint32(in.GetCiphertext()))
	material, ok := k.versions[version]
	if !ok {
		return nil, invalid
	}
	if state := k.state(version); state != kmspb.CryptoKeyVersion_ENABLED {
		return nil, status.Errorf(codes.FailedPrecondition, "%s is not enabled, current state is: %s.", k.versionName(version), state)
	}
	plaintext, err := newAEAD(material).Open(nil, nil, in.GetCiphertext()[4:], in.GetAdditionalAuthenticatedData())
	if err != nil {
		return nil, invalid
	}
	return &kmspb.DecryptResponse{
		Plaintext: plaintext, PlaintextCrc32C: checksum(plaintext), UsedPrimary: version == k.latest, ProtectionLevel: kmspb.ProtectionLevel_SOFTWARE,
	}, nil
}

// GetCryptoKey implements kmspb.KeyManagementServiceServer.
func (g google) GetCryptoKey(_ context.Context, in *kmspb.GetCryptoKeyRequest) (*kmspb.CryptoKey, error) {
	k, err := g.find(in.GetName())
	if err != nil {
		return nil, err
	}
	c := &kmspb.CryptoKey{Name: gcpRing + k.name, Purpose: kmspb.CryptoKey_ENCRYPT_DECRYPT, CreateTime: timestamppb.New(k.created)}
	if k.kind != "" { // of such a key there is no primary version
		c.Purpose = kmspb.CryptoKey_ASYMMETRIC_DECRYPT
		return c, nil
	}
	c.Primary = k.version(k.latest)
	return c, nil
}

// ListCryptoKeyVersions implements kmspb.KeyManagementServiceServer.
func (g google) ListCryptoKeyVersions(_ context.Context, in *kmspb.ListCryptoKeyVersionsRequest) (*kmspb.ListCryptoKeyVersionsResponse, error) {
	k, err := g.find(in.GetParent())
	if err != nil {
		return nil, err
	}
	out := &kmspb.ListCryptoKeyVersionsResponse{TotalSize: int32(k.latest)}
	first, _ := strconv.Atoi(in.GetPageToken())
	for v := max(first, 1); v <= k.latest; v++ {
		if size := int(in.GetPageSize()); size > 0 && len(out.GetCryptoKeyVersions()) == size {
			out.NextPageToken = strconv.Itoa(v)
			break
		}
		out.CryptoKeyVersions = append(out.CryptoKeyVersions, k.version(v))
	}
	return out, nil
}

// DestroyCryptoKeyVersion implements kmspb.KeyManagementServiceServer.
func (g google) DestroyCryptoKeyVersion(_ context.Context, in *kmspb.DestroyCryptoKeyVersionRequest) (*kmspb.CryptoKeyVersion, error) {
	name, number, _ := strings.Cut(in.GetName(), "/cryptoKeyVersions/")
	k, err := g.find(name)
	if err != nil {
		return nil, err
	}
	version, _ := strconv.Atoi(number)
	if _, ok := k.versions[version]; !ok {
		return nil, status.Errorf(codes.NotFound, "CryptoKeyVersion %s not found.", in.GetName())
	}
	if !k.destroyed[version].IsZero() {
		return nil, status.Errorf(codes.FailedPrecondition, "%s is not in a state that can be destroyed: %s.", in.GetName(), k.state(version))
	}
	k.destroyed[version] = time.Now().AddDate(0, 0, 30).Truncate(time.Second)
	return k.version(version), nil
}

func (k *key) state(version int) kmspb.CryptoKeyVersion_CryptoKeyVersionState {
	switch {
	case !k.destroyed[version].IsZero():
		return kmspb.CryptoKeyVersion_DESTROY_SCHEDULED
	case k.disabled:
		return kmspb.CryptoKeyVersion_DISABLED
	}
	return kmspb.CryptoKeyVersion_ENABLED
}

func (k *key) versionName(version int) string {
	return fmt.Sprintf("%s%s/cryptoKeyVersions/%d", gcpRing, k.name, version)
}

func (k *key) version(version int) *kmspb.CryptoKeyVersion {
	v := &kmspb.CryptoKeyVersion{
		Name: k.versionName(version), State: k.state(version), ProtectionLevel: kmspb.ProtectionLevel_SOFTWARE,
		Algorithm: kmspb.CryptoKeyVersion_GOOGLE_SYMMETRIC_ENCRYPTION, CreateTime: timestamppb.New(k.created),
	}
	if at := k.destroyed[version]; !at.IsZero() {
		v.DestroyTime = timestamppb.New(at)
	}
	return v
}
