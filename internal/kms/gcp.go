package kms

import (
	"context"
	"errors"
	"net/url"
	"path"
	"regexp"
	"strings"
	"time"

	cloudkms "cloud.google.com/go/kms/apiv1"
	"cloud.google.com/go/kms/apiv1/kmspb"
	"gocloud.dev/secrets"
	"gocloud.dev/secrets/gcpkms"
	"google.golang.org/api/iterator"
	"google.golang.org/api/option"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/latticekeep/latticekeep/internal/fault"
)

// google is a key of Google Cloud KMS.
type google struct {
	client *cloudkms.KeyManagementClient
	keeper *secrets.Keeper
	name   string
}

var googleName = regexp.MustCompile(`^projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+$`)

// openGCP opens gcpkms://projects/P/locations/L/keyRings/R/cryptoKeys/K. The
// parameter endpoint names another address than Google's: of a region, or
// private.
func openGCP(ctx context.Context, u *url.URL, o Options) (*Key, error) {
	values, err := parameters(u, "endpoint")
	if err != nil {
		return nil, err
	}
	name := path.Join(u.Host, u.Path)
	if !googleName.MatchString(name) {
		return nil, unfit("name the key of Google Cloud KMS as gcpkms://projects/P/locations/L/keyRings/R/cryptoKeys/K, without a version")
	}
	options, err := dialGoogle(values["endpoint"], o)
	if err != nil {
		return nil, err
	}
	// The context is the client's for as long as it lives.
	client, err := cloudkms.NewKeyManagementClient(context.WithoutCancel(ctx), options...)
	if err != nil {
		return nil, fault.Wrap(fault.Invalid, "there are no Google credentials: give the pod a workload identity, or set GOOGLE_APPLICATION_CREDENTIALS", err)
	}
	client.CallOptions = &cloudkms.KeyManagementCallOptions{} // no retries: see try
	g := &google{client: client}
	if err := try(ctx, o.Logger, "reading the key's purpose", func(ctx context.Context) error { return g.check(ctx, name) }); err != nil {
		_ = g.close()
		return nil, needs("cloudkms.cryptoKeys.get", err)
	}
	g.keeper = gcpkms.OpenKeeper(client, g.name, nil)
	return &Key{id: "gcpkms:" + g.name, service: g}, nil
}

func dialGoogle(endpoint string, o Options) ([]option.ClientOption, error) {
	transport := credentials.NewTLS(tlsConfig(nil, o))
	var options []option.ClientOption
	if endpoint != "" {
		u, err := url.Parse(endpoint)
		if err != nil || strings.Trim(u.Path, "/") != "" {
			return nil, unfit("the parameter endpoint of gcpkms is no address: give https://host")
		}
		if err := checkAddress(u); err != nil {
			return nil, err
		}
		port := u.Port()
		if port == "" {
			port = "443"
		}
		options = append(options, option.WithEndpoint(u.Hostname()+":"+port))
		if u.Scheme == "http" { // on this machine; credentials stay at home
			transport = insecure.NewCredentials()
			options = append(options, option.WithoutAuthentication())
		}
	}
	return append(options,
		option.WithGRPCDialOption(grpc.WithTransportCredentials(transport)),
		// After an outage the service is found again within a second.
		option.WithGRPCDialOption(grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: firstPause, Multiplier: 2, Jitter: 0.5, MaxDelay: lastPause}, MinConnectTimeout: lastPause,
		})),
		option.WithGRPCDialOption(grpc.WithIdleTimeout(90*time.Second)),
		option.WithGRPCDialOption(grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswer))),
	), nil
}

// check sees that the key is there, symmetric and usable, and keeps its name.
func (g *google) check(ctx context.Context, name string) error {
	key, err := g.client.GetCryptoKey(ctx, &kmspb.GetCryptoKeyRequest{Name: name})
	if err != nil {
		return googleFailed(err)
	}
	primary := key.GetPrimary()
	switch {
	case key.GetPurpose() != kmspb.CryptoKey_ENCRYPT_DECRYPT:
		return unfit("the purpose of the KMS key is %s: RSA and EC wrapping is opened by a quantum computer; make a key for ENCRYPT_DECRYPT", key.GetPurpose())
	case primary == nil:
		return unfit("the KMS key has no primary version: make one")
	case primary.GetAlgorithm() != kmspb.CryptoKeyVersion_GOOGLE_SYMMETRIC_ENCRYPTION:
		return unfit("the algorithm of the KMS key is %s: make a key of GOOGLE_SYMMETRIC_ENCRYPTION", primary.GetAlgorithm())
	case primary.GetState() != kmspb.CryptoKeyVersion_ENABLED:
		return unfit("the primary version of the KMS key is %s: enable it", primary.GetState())
	case !googleName.MatchString(key.GetName()):
		return unfit("what answers at the address of Google Cloud KMS is not it")
	}
	g.name = key.GetName()
	return nil
}

func (g *google) encrypt(ctx context.Context, plaintext []byte) ([]byte, error) {
	b, err := g.keeper.Encrypt(ctx, plaintext)
	if err != nil {
		return nil, googleFailed(err)
	}
	return b, nil
}

func (g *google) decrypt(ctx context.Context, ciphertext []byte) ([]byte, error) {
	b, err := g.keeper.Decrypt(ctx, ciphertext)
	switch {
	case err == nil:
		return b, nil
	case codeOf(err) == codes.InvalidArgument:
		return nil, ErrForeign
	}
	return nil, googleFailed(err)
}

// codeOf looks for the status under gocloud's and the client's own errors.
func codeOf(err error) codes.Code {
	var s interface{ GRPCStatus() *status.Status }
	if errors.As(err, &s) {
		return s.GRPCStatus().Code()
	}
	return codes.Unavailable
}

func googleFailed(err error) error {
	switch codeOf(err) {
	case codes.PermissionDenied, codes.Unauthenticated, codes.FailedPrecondition, codes.NotFound, codes.InvalidArgument, codes.Unimplemented:
		return failed(err, false)
	}
	return failed(err, true)
}

func (g *google) destroy(ctx context.Context) (Destruction, error) {
	d := Destruction{Undo: "gcloud kms keys versions restore, for each of its versions, then enable"}
	versions := g.client.ListCryptoKeyVersions(ctx, &kmspb.ListCryptoKeyVersionsRequest{Parent: g.name})
	for {
		v, err := versions.Next()
		switch {
		case errors.Is(err, iterator.Done):
			return d, nil
		case err != nil:
			return Destruction{}, googleFailed(err)
		}
		switch v.GetState() {
		case kmspb.CryptoKeyVersion_ENABLED, kmspb.CryptoKeyVersion_DISABLED: // one that is disabled would open what it wrapped when enabled again
			if v, err = g.client.DestroyCryptoKeyVersion(ctx, &kmspb.DestroyCryptoKeyVersionRequest{Name: v.GetName()}); err != nil {
				return Destruction{}, googleFailed(err)
			}
		case kmspb.CryptoKeyVersion_DESTROY_SCHEDULED: // before, or by a try that failed later
		default:
			continue
		}
		if at := v.GetDestroyTime().AsTime(); v.GetDestroyTime() != nil && at.After(d.When) {
			d.When = at
		}
	}
}

func (g *google) close() error { return g.client.Close() }
