package kms

import (
	"bytes"
	"context"
	"errors"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/test/kmstest"
)

// providers are the services with a network protocol.
var providers = map[string]func(...kmstest.Option) (*kmstest.Server, error){
	"awskms": kmstest.NewAWS, "gcpkms": kmstest.NewGCP, "hashivault": kmstest.NewVault,
}

// serve starts a service for a test and sets the environment for it.
func serve(t *testing.T, provider string, o ...kmstest.Option) *kmstest.Server {
	t.Helper()
	s, err := providers[provider](o...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	for _, variable := range s.Env() {
		name, value, _ := strings.Cut(variable, "=")
		t.Setenv(name, value)
	}
	return s
}

func open(t *testing.T, url string) *Key {
	t.Helper()
	k, err := Open(t.Context(), url, Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Close() })
	return k
}

// each runs a test against every provider.
func each(t *testing.T, test func(t *testing.T, s *kmstest.Server, k *Key)) {
	for name := range providers {
		t.Run(name, func(t *testing.T) {
			s := serve(t, name)
			test(t, s, open(t, s.URL()))
		})
	}
}

var secretKey = bytes.Repeat([]byte{7}, 32)

func wrap(t *testing.T, k *Key, keyContext string) []byte {
	t.Helper()
	b, err := k.Wrap(t.Context(), keyContext, secretKey)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestAServiceOpensOnlyWhatItWrappedForTheContext(t *testing.T) {
	each(t, func(t *testing.T, s *kmstest.Server, k *Key) {
		s.AddKey("other", "")
		other := open(t, s.KeyURL("other"))
		b := wrap(t, k, "tenant a")
		if got, err := k.Unwrap(t.Context(), "tenant a", b); err != nil || !bytes.Equal(got, secretKey) {
			t.Fatal(got, err)
		}
		if bytes.Contains(b, secretKey) {
			t.Error("the key can be read in what is stored")
		}
		for _, c := range []string{"tenant b", "tenant ", "tenant a\x00", ""} {
			if _, err := k.Unwrap(t.Context(), c, b); !errors.Is(err, ErrForeign) {
				t.Errorf("for context %q: %v", c, err)
			}
		}
		if _, err := other.Unwrap(t.Context(), "tenant a", b); !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), k.ID()) {
			t.Error("by another key:", err)
		}
		renamed, _ := parseWrapped(b)
		renamed.key = other.ID()
		s.ResetCalls()
		if _, err := other.Unwrap(t.Context(), "tenant a", renamed.marshal()); !errors.Is(err, ErrForeign) {
			t.Error("by a key that the stored form was changed to:", err)
		}
		if n := s.Calls(); n != 1 {
			t.Errorf("%d calls for what cannot be opened", n)
		}
		for i := range b {
			bad := bytes.Clone(b)
			bad[i] ^= 1
			// The last character of Vault's base64 has spare bits, which Vault ignores.
			got, err := k.Unwrap(t.Context(), "tenant a", bad)
			if spare := strings.HasPrefix(k.ID(), "hashivault") && bytes.Equal(got, secretKey); err == nil && !spare || errors.Is(err, fault.Unavailable) {
				t.Fatalf("byte %d of %d flipped: %x, %v", i, len(b), got, err)
			}
		}
		for n := range b {
			if _, err := k.Unwrap(t.Context(), "tenant a", b[:n]); err == nil {
				t.Fatalf("opened when cut to %d bytes", n)
			}
		}
	})
}

func TestARotatedKeyOpensWhatItWrappedBefore(t *testing.T) {
	each(t, func(t *testing.T, s *kmstest.Server, k *Key) {
		before := wrap(t, k, "c")
		s.Rotate(kmstest.DefaultKey)
		for _, b := range [][]byte{before, wrap(t, k, "c")} {
			if got, err := k.Unwrap(t.Context(), "c", b); err != nil || !bytes.Equal(got, secretKey) {
				t.Error(err)
			}
		}
		if again := open(t, s.URL()); again.ID() != k.ID() {
			t.Error("the id changed with the version:", k.ID(), again.ID())
		}
	})
}

func TestTheIDNamesProviderAndKey(t *testing.T) {
	want := map[string]func(*kmstest.Server) string{
		"awskms": func(s *kmstest.Server) string { return "awskms:" + s.ARN(kmstest.DefaultKey) },
		"gcpkms": func(*kmstest.Server) string {
			return "gcpkms:projects/test/locations/europe-west1/keyRings/latticekeep/cryptoKeys/latticekeep"
		},
		"hashivault": func(s *kmstest.Server) string { return "hashivault:" + s.Address() + "/transit/latticekeep" },
	}
	each(t, func(t *testing.T, s *kmstest.Server, k *Key) {
		provider, _, _ := strings.Cut(k.ID(), ":")
		if k.ID() != want[provider](s) {
			t.Error(k.ID())
		}
		if id, ok := KeyOf(wrap(t, k, "c")); !ok || id != k.ID() {
			t.Error(id, ok)
		}
	})
}

func TestOnlyASymmetricKeyThatMayBeUsedIsOpened(t *testing.T) {
	quantum := "opened by a quantum computer"
	for name, c := range map[string]struct {
		provider, kind, says string
	}{
		"vault, RSA":                   {"hashivault", "rsa-4096", quantum},
		"vault, ECDSA":                 {"hashivault", "ecdsa-p256", quantum},
		"vault, Ed25519":               {"hashivault", "ed25519", quantum},
		"vault, AES-128":               {"hashivault", "aes128-gcm96", "too short"},
		"vault, HMAC":                  {"hashivault", "hmac", "does not serve"},
		"vault, ChaCha20":              {"hashivault", "chacha20-poly1305", ""},
		"vault, XChaCha20":             {"hashivault", "xchacha20-poly1305", ""},
		"aws, RSA":                     {"awskms", "RSA_4096", quantum},
		"aws, HMAC":                    {"awskms", "HMAC_256", "SYMMETRIC_DEFAULT"},
		"gcp, RSA":                     {"gcpkms", "RSA_DECRYPT_OAEP_4096_SHA256", quantum},
		"a key that is not there":      {"hashivault", "", "vault write -f transit/keys/gone"},
		"a key that is not there, AWS": {"awskms", "", "see that it exists"},
		"a key that is not there, GCP": {"gcpkms", "", "see that it exists"},
	} {
		t.Run(name, func(t *testing.T) {
			s := serve(t, c.provider)
			s.AddKey("special", c.kind)
			url := s.KeyURL("special")
			if c.kind == "" {
				url = s.KeyURL("gone")
			}
			_, err := Open(t.Context(), url, Options{})
			if c.says == "" {
				if err != nil {
					t.Fatal(err)
				}
				return
			}
			if fault.Of(err) != fault.Invalid || !strings.Contains(fault.Message(err), c.says) {
				t.Fatalf("kind %v: %v", fault.Of(err), err)
			}
			if n := s.Calls(); n != 1 {
				t.Errorf("asked %d times", n)
			}
		})
	}
	t.Run("derived", func(t *testing.T) {
		s := serve(t, "hashivault")
		s.SetDerived(kmstest.DefaultKey)
		if _, err := Open(t.Context(), s.URL(), Options{}); fault.Of(err) != fault.Invalid || !strings.Contains(err.Error(), "derived=true") {
			t.Fatal(err)
		}
	})
	for _, provider := range []string{"awskms", "gcpkms"} {
		t.Run("disabled/"+provider, func(t *testing.T) {
			s := serve(t, provider)
			s.SetDisabled(kmstest.DefaultKey, true)
			if _, err := Open(t.Context(), s.URL(), Options{}); fault.Of(err) != fault.Invalid || !strings.Contains(err.Error(), "enable it") {
				t.Fatal(err)
			}
		})
	}
}

func TestAMissingPermissionIsNamed(t *testing.T) {
	permissions := map[string]string{
		"awskms": "kms:DescribeKey", "gcpkms": "cloudkms.cryptoKeys.get", "hashivault": "read on transit/keys/latticekeep",
	}
	for provider, permission := range permissions {
		s := serve(t, provider)
		s.SetForbidden("describe", true)
		if _, err := Open(t.Context(), s.URL(), Options{}); fault.Of(err) != fault.Invalid || !strings.Contains(fault.Message(err), permission) {
			t.Errorf("%s: %v", provider, err)
		}
	}
}

func TestAURLThatDoesNotServeIsRefusedWithARemedy(t *testing.T) {
	t.Setenv("VAULT_ADDR", "https://vault.example.com")
	t.Setenv("VAULT_TOKEN", "t")
	t.Setenv("AWS_REGION", "")
	t.Setenv("AWS_CONFIG_FILE", "/dev/null")
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	const gcp = "gcpkms://projects/p/locations/l/keyRings/r/cryptoKeys/k"
	for url, says := range map[string]string{
		"azurekeyvault://vault/keys/k":     "RSA",
		"base64key://":                     "awskms://",
		"":                                 "awskms://",
		"hashivault://":                    "hashivault://NAME",
		"hashivault://a/b":                 "hashivault://NAME",
		"hashivault://k?engine=../sys":     "hashivault://NAME",
		"hashivault://k?engin=x":           "unknown",
		"hashivault://k?engine=a&engine=b": "repeated",
		"hashivault://k?address=http://vault.example.com": "plain http",
		"hashivault://k?address=ftp://vault.example.com":  "https://host",
		"awskms:///":        "awskms:///ARN",
		"awskms:///alias/k": "region",
		"awskms:///alias/k?region=eu-central-1&context_a=b":              "unknown",
		"awskms:///alias/k?region=eu-central-1&endpoint=http://10.1.2.3": "plain http",
		gcp + "/cryptoKeyVersions/1":                                     "without a version",
		gcp + "?endpoint=http://kms.example.com":                         "plain http",
		gcp + "?aad=eA":                                                  "unknown",
		"file://kms.key":                                                 "file:///",
		"file:kms.key":                                                   "file:///",
		"file:///none?x=y":                                               "file:///",
		"hashivault://user:pass@k":                                       "unknown",
		"hashi vault://\x00pass":                                         "cannot be read",
	} {
		_, err := Open(t.Context(), url, Options{})
		if fault.Of(err) != fault.Invalid || !strings.Contains(fault.Message(err), says) || strings.Contains(err.Error(), "pass") {
			t.Errorf("%q: kind %v: %v", url, fault.Of(err), err)
		}
	}
	t.Run("by the environment", func(t *testing.T) {
		s := serve(t, "awskms")
		t.Setenv("AWS_ENDPOINT_URL_KMS", "http://kms.example.com")
		_, err := Open(t.Context(), "awskms:///"+s.ARN(kmstest.DefaultKey), Options{})
		if fault.Of(err) != fault.Invalid || !strings.Contains(err.Error(), "plain http") {
			t.Error(err)
		}
	})
}

func TestAKeyFileIsOpenedByItsURL(t *testing.T) {
	l, path := create(t)
	k := open(t, "file://"+path)
	if k.ID() != l.ID() || !strings.HasPrefix(k.ID(), "local:") {
		t.Error(k.ID(), l.ID())
	}
	if got, err := l.Unwrap(t.Context(), "c", wrap(t, k, "c")); err != nil || !bytes.Equal(got, secretKey) {
		t.Error(err)
	}
	if _, err := Open(t.Context(), "file://"+filepath.Join(t.TempDir(), "none"), Options{}); fault.Of(err) != fault.Invalid {
		t.Error(err)
	}
}

// A service may start late, so Open retries until its time limit.
func TestAServiceThatCannotBeReachedIsAnErrorInTime(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close()
	for provider := range providers {
		t.Run(provider, func(t *testing.T) {
			s := serve(t, provider)
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			_, err := Open(ctx, strings.ReplaceAll(s.URL(), strings.ReplaceAll(s.Address(), ":", "%3A"), address), Options{})
			if fault.Of(err) != fault.Unavailable || s.Calls() != 0 {
				t.Error(err)
			}
			s.SetFailing(true)
			again, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			if _, err := Open(again, s.URL(), Options{}); fault.Of(err) != fault.Unavailable || s.Calls() < 2 {
				t.Error(s.Calls(), err)
			}
		})
	}
}
