package generate

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/mlkem"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"slices"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// keyPairs maps an algorithm to a function that makes a private and a public key as PEM files.
var keyPairs = map[string]func() (private, public secret.Bytes, err error){
	"Ed25519": func() (secret.Bytes, secret.Bytes, error) {
		return fromSeed(ed25519.SeedSize, ed25519Pair)
	},
	"ECDSA-P256": func() (secret.Bytes, secret.Bytes, error) {
		return classical(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	},
	"ECDSA-P384": func() (secret.Bytes, secret.Bytes, error) {
		return classical(ecdsa.GenerateKey(elliptic.P384(), rand.Reader))
	},
	"RSA-3072": func() (secret.Bytes, secret.Bytes, error) {
		return classical(rsa.GenerateKey(rand.Reader, 3072))
	},
	"RSA-4096": func() (secret.Bytes, secret.Bytes, error) {
		return classical(rsa.GenerateKey(rand.Reader, 4096))
	},
	"ML-DSA-65": func() (secret.Bytes, secret.Bytes, error) {
		return fromSeed(dualsig.SeedSize, mlDSA65Pair)
	},
	"ML-KEM-768": func() (secret.Bytes, secret.Bytes, error) {
		return fromSeed(mlkem.SeedSize, mlKEM768Pair)
	},
}

// These headers are DER up to the key material. A private key in seed form has version 0, the
// algorithm without parameters, and an octet string that holds the seed as [0] IMPLICIT OCTET
// STRING. A public key is a SubjectPublicKeyInfo. All lengths are fixed, so DER is the header
// followed by the seed or the key.
const (
	// id-ml-dsa-65, 2.16.840.1.101.3.4.3.18
	mlDSA65Header = "\x30\x34\x02\x01\x00" + "\x30\x0b\x06\x09\x60\x86\x48\x01\x65\x03\x04\x03\x12" + "\x04\x22\x80\x20"
	// id-alg-ml-kem-768, 2.16.840.1.101.3.4.4.2
	mlKEM768Header       = "\x30\x54\x02\x01\x00" + "\x30\x0b\x06\x09\x60\x86\x48\x01\x65\x03\x04\x04\x02" + "\x04\x42\x80\x40"
	mlKEM768PublicHeader = "\x30\x82\x04\xb2" + "\x30\x0b\x06\x09\x60\x86\x48\x01\x65\x03\x04\x04\x02" + "\x03\x82\x04\xa1\x00"
)

// fromSeed makes a key pair from a fresh seed, which it zeroes.
func fromSeed(size int, pair func(seed []byte) (private, public secret.Bytes, err error)) (private, public secret.Bytes, err error) {
	seed := make([]byte, size)
	defer clear(seed)
	rand.Read(seed) // never fails: crypto/rand ends the program instead
	return pair(seed)
}

func ed25519Pair(seed []byte) (private, public secret.Bytes, err error) {
	key := ed25519.NewKeyFromSeed(seed)
	defer clear(key)
	return classical(key, nil)
}

func mlDSA65Pair(seed []byte) (private, public secret.Bytes, err error) {
	key, err := dualsig.NewPrivateKey(seed)
	if err != nil {
		return nil, nil, err
	}
	return seedPEM(mlDSA65Header, seed), key.Public().MarshalPEM(), nil
}

func mlKEM768Pair(seed []byte) (private, public secret.Bytes, err error) {
	key, err := mlkem.NewDecapsulationKey768(seed)
	if err != nil {
		return nil, nil, err
	}
	spki := append([]byte(mlKEM768PublicHeader), key.EncapsulationKey().Bytes()...)
	return seedPEM(mlKEM768Header, seed), encodePEM("PUBLIC KEY", spki), nil
}

func seedPEM(header string, seed []byte) secret.Bytes {
	der := slices.Concat([]byte(header), seed)
	defer clear(der)
	return encodePEM("PRIVATE KEY", der)
}

// classical encodes a key of the standard library. It takes the results of a key generator,
// including the error.
func classical[K crypto.Signer](key K, err error) (private, public secret.Bytes, _ error) {
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, fmt.Errorf("encoding private key: %w", err)
	}
	defer clear(der)
	spki, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, nil, fmt.Errorf("encoding public key: %w", err)
	}
	return encodePEM("PRIVATE KEY", der), encodePEM("PUBLIC KEY", spki), nil
}

// encodePEM is pem.EncodeToMemory (RFC 7468) without internal buffers, which would keep copies of
// the secret.
func encodePEM(kind string, der []byte) secret.Bytes {
	const perLine = 48 // bytes; 64 characters
	begin, end := "-----BEGIN "+kind+"-----\n", "-----END "+kind+"-----\n"
	lines := (len(der) + perLine - 1) / perLine
	out := make(secret.Bytes, 0, len(begin)+base64.StdEncoding.EncodedLen(len(der))+lines+len(end))
	out = append(out, begin...)
	for line := range slices.Chunk(der, perLine) {
		out = base64.StdEncoding.AppendEncode(out, line)
		out = append(out, '\n')
	}
	return append(out, end...)
}
