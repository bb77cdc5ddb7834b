package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/envelope"
)

// A primitive is a piece of cryptography that an operation needs, over data of the size that the
// operation has.
type primitive int

const (
	sealMessage    primitive = iota // ML-KEM-768 encapsulation, HKDF-SHA-512, AES-256-GCM of 1 KiB
	openMessage                     // ML-KEM-768 decapsulation, HKDF-SHA-512, AES-256-GCM of 1 KiB
	sealCredential                  // ML-KEM-768 key generation and encapsulation, HKDF-SHA-512 twice, AES-256-GCM of 1 KiB and of the seed
	openCredential                  // HKDF-SHA-512 and AES-256-GCM twice, ML-KEM-768 key generation from the seed and decapsulation
	dualSign                        // ML-DSA-65 signature and HMAC-SHA-512 of a ciphertext or a record, 2.3 KiB
	dualVerify                      // the same, verified
	dataSign                        // ML-DSA-65 signature and HMAC-SHA-512 of the caller's 1 KiB
	dataVerify                      // the same, verified
	entrySign                       // ML-DSA-65 signature of an audit entry's hash
	primitives
)

func (p primitive) String() string {
	return [...]string{
		"seal a message", "open a message", "seal a credential", "open a credential",
		"dual signature", "verify a dual signature", "sign data", "verify data", "sign an entry",
	}[p]
}

// contains returns the algorithms in a primitive, as FIPS 203 and 204 and other standards name
// them.
func (p primitive) contains() string {
	return [...]string{
		"ML-KEM-768 encapsulation, HKDF-SHA-512, AES-256-GCM of 1 KiB",
		"ML-KEM-768 decapsulation, HKDF-SHA-512, AES-256-GCM of 1 KiB",
		"ML-KEM-768 key generation and encapsulation, 2 × HKDF-SHA-512, AES-256-GCM of 1 KiB and of the seed",
		"ML-KEM-768 key generation from the seed and decapsulation, 2 × HKDF-SHA-512, AES-256-GCM of the seed and of 1 KiB",
		"ML-DSA-65 and HMAC-SHA-512 over 2.3 KiB, signed",
		"ML-DSA-65 and HMAC-SHA-512 over 2.3 KiB, verified",
		"ML-DSA-65 and HMAC-SHA-512 over 1 KiB, signed",
		"ML-DSA-65 and HMAC-SHA-512 over 1 KiB, verified",
		"ML-DSA-65 over a hash, signed",
	}[p]
}

// bench holds a function for each primitive.
type bench [primitives]func() error

func newBench() (*bench, error) {
	random := make([]byte, envelope.KEMSeedSize+envelope.KeySize+dualsig.SeedSize+dualsig.MACKeySize)
	if _, err := rand.Read(random); err != nil {
		return nil, err
	}
	cut := func(n int) (b []byte) { b, random = random[:n], random[n:]; return b }
	kem, err := envelope.NewKEMKey(cut(envelope.KEMSeedSize))
	wrapping := cut(envelope.KeySize)
	seed := cut(dualsig.SeedSize)
	signing, err2 := dualsig.NewKey(1, seed, cut(dualsig.MACKeySize))
	entries, err3 := dualsig.NewPrivateKey(seed)
	if err := errors.Join(err, err2, err3); err != nil {
		return nil, err
	}
	const context = "latticekeep/bench/v1"
	tenant, id := "ten_"+strings.Repeat("a", 26), "cred_"+strings.Repeat("a", 26)
	ofMessage := envelope.MessageContext{Tenant: tenant, KeyID: id, Version: 1}
	ofCredential := envelope.Context{Tenant: tenant, ID: id, Version: 1}
	plain, record, hash := []byte(payload), []byte(strings.Repeat("r", 2300)), make([]byte, 32)

	message, err := kem.Seal(ofMessage, plain)
	body, wrap, err2 := envelope.SealCredential(wrapping, 1, ofCredential, plain)
	dual, err3 := signing.Sign(context, record)
	pqc, tag, err4 := signing.SignData(plain)
	if err := errors.Join(err, err2, err3, err4); err != nil {
		return nil, err
	}
	verified := func(ok bool) error {
		if !ok {
			return errors.New("a signature does not verify")
		}
		return nil
	}
	return &bench{
		sealMessage: func() error { _, err := kem.Seal(ofMessage, plain); return err },
		openMessage: func() error { _, err := kem.Open(ofMessage, message); return err },
		sealCredential: func() error {
			_, _, err := envelope.SealCredential(wrapping, 1, ofCredential, plain)
			return err
		},
		openCredential: func() error { _, err := envelope.OpenCredential(wrapping, ofCredential, body, wrap); return err },
		dualSign:       func() error { _, err := signing.Sign(context, record); return err },
		dualVerify:     func() error { return verified(signing.Verify(context, record, dual)) },
		dataSign:       func() error { _, _, err := signing.SignData(plain); return err },
		dataVerify:     func() error { return verified(signing.VerifyData(plain, pqc, tag)) },
		entrySign:      func() error { _, err := entries.Sign(context, hash); return err },
	}, nil
}

// costs is the mean time of each primitive.
type costs [primitives]time.Duration

func (c costs) of(o operation) (sum time.Duration) {
	for _, p := range o.costs {
		sum += c[p]
	}
	return sum
}

// limit returns the number of operations per second if all cores ran only its primitives.
func (c costs) limit(o operation) float64 {
	return float64(cores) / c.of(o).Seconds()
}

// measure runs every primitive for a time on the given number of cores at once. It counts processor
// time, which other load on the machine does not change.
func (b *bench) measure(each time.Duration, cores int) (c costs, err error) {
	for p := range primitives {
		var done atomic.Int64
		failures := make([]error, cores)
		var wg sync.WaitGroup
		began, before := time.Now(), own()
		for i := range cores {
			wg.Go(func() {
				for failures[i] == nil && time.Since(began) < each {
					failures[i] = b[p]()
					done.Add(1)
				}
			})
		}
		wg.Wait()
		if err := errors.Join(failures...); err != nil {
			return c, fmt.Errorf("measuring %s: %w", p, err)
		}
		c[p] = (own() - before) / time.Duration(done.Load())
	}
	return c, nil
}
