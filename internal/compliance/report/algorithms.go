package report

import (
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// Algorithm is the name of an algorithm that this product uses.
type Algorithm string

// The algorithms.
const (
	MLKEM768       Algorithm = "ML-KEM-768"
	MLDSA65        Algorithm = "ML-DSA-65"
	AES256GCM      Algorithm = "AES-256-GCM"
	HKDFSHA512     Algorithm = "HKDF-SHA-512"
	HMACSHA512     Algorithm = "HMAC-SHA-512"
	SHA3256        Algorithm = "SHA3-256"
	SHA256         Algorithm = "SHA-256"
	Argon2id       Algorithm = "argon2id"
	X25519         Algorithm = "X25519"
	HPKEHybrid     Algorithm = "MLKEM768-X25519" // HPKE for SealedCredential
	HPKEPure       Algorithm = "MLKEM768"        // HPKE for SealedCredential, without a classical part
	GroupHybrid    Algorithm = "X25519MLKEM768"  // TLS group
	GroupX25519    Algorithm = "x25519"          // TLS group
	GroupSecp256r1 Algorithm = "secp256r1"       // TLS group
	GroupSecp384r1 Algorithm = "secp384r1"       // TLS group
)

// primitive describes an algorithm. Its levels are bits of classical security and the categories 1
// to 5 of NIST's post-quantum process. 0 means that a quantum computer breaks it, and -1 that
// neither level applies.
type primitive struct {
	algorithm Algorithm
	kind      cdx.CryptoPrimitive
	what      string // description in one line
	parameter string
	curve     string
	oid       string
	mode      cdx.CryptoAlgorithmMode
	functions []cdx.CryptoFunction
	classical int
	quantum   int
	parts     []Algorithm
	group     bool // TLS group
}

// primitives holds all algorithms. OIDs are from NIST's CSOR, RFC 8410 (X25519), RFC 8619 (HKDF)
// and RFC 8018 (HMAC). Algorithms without an OID there have none here.
var primitives = []primitive{
	{
		algorithm: MLKEM768, kind: cdx.CryptoPrimitiveKEM, what: "key encapsulation, FIPS 203", parameter: "768", oid: "2.16.840.1.101.3.4.4.2",
		functions: []cdx.CryptoFunction{cdx.CryptoFunctionKeygen, cdx.CryptoFunctionEncapsulate, cdx.CryptoFunctionDecapsulate},
		classical: 192, quantum: 3,
	},
	{
		algorithm: MLDSA65, kind: cdx.CryptoPrimitiveSignature, what: "signatures, FIPS 204, hedged", parameter: "65", oid: "2.16.840.1.101.3.4.3.18",
		functions: []cdx.CryptoFunction{cdx.CryptoFunctionKeygen, cdx.CryptoFunctionSign, cdx.CryptoFunctionVerify},
		classical: 192, quantum: 3,
	},
	{
		algorithm: AES256GCM, kind: cdx.CryptoPrimitiveAE, what: "authenticated encryption, NIST SP 800-38D", parameter: "256", mode: cdx.CryptoAlgorithmModeGCM,
		oid:       "2.16.840.1.101.3.4.1.46",
		functions: []cdx.CryptoFunction{cdx.CryptoFunctionKeygen, cdx.CryptoFunctionEncrypt, cdx.CryptoFunctionDecrypt, cdx.CryptoFunctionTag},
		classical: 256, quantum: 5,
	},
	{
		algorithm: HKDFSHA512, kind: cdx.CryptoPrimitiveKDF, what: "key derivation, RFC 5869", parameter: "512", oid: "1.2.840.113549.1.9.16.3.30",
		functions: []cdx.CryptoFunction{cdx.CryptoFunctionKeyderive}, classical: 256, quantum: 5,
	},
	{
		algorithm: HMACSHA512, kind: cdx.CryptoPrimitiveMAC, what: "message authentication, FIPS 198-1", parameter: "512", oid: "1.2.840.113549.2.11",
		functions: []cdx.CryptoFunction{cdx.CryptoFunctionKeygen, cdx.CryptoFunctionTag, cdx.CryptoFunctionVerify}, classical: 256, quantum: 5,
	},
	{
		algorithm: SHA3256, kind: cdx.CryptoPrimitiveHash, what: "the hash chain of the audit log, FIPS 202", parameter: "256", oid: "2.16.840.1.101.3.4.2.8",
		functions: []cdx.CryptoFunction{cdx.CryptoFunctionDigest}, classical: 128, quantum: 2,
	},
	{
		algorithm: SHA256, kind: cdx.CryptoPrimitiveHash, what: "the tree over the audit log, FIPS 180-4 and RFC 6962", parameter: "256", oid: "2.16.840.1.101.3.4.2.1",
		functions: []cdx.CryptoFunction{cdx.CryptoFunctionDigest}, classical: 128, quantum: 2,
	},
	{
		algorithm: Argon2id, kind: cdx.CryptoPrimitiveKDF, what: "hashes of passwords, RFC 9106",
		functions: []cdx.CryptoFunction{cdx.CryptoFunctionKeyderive}, classical: -1, quantum: -1,
	},
	{
		algorithm: X25519, kind: cdx.CryptoPrimitiveKeyAgree, what: "the classical half of the hybrids, RFC 7748", curve: "Curve25519", oid: "1.3.101.110",
		functions: []cdx.CryptoFunction{cdx.CryptoFunctionKeygen, cdx.CryptoFunctionKeyderive}, classical: 128,
	},
	{
		algorithm: HPKEHybrid, kind: cdx.CryptoPrimitiveCombiner, what: "sealing of SealedCredential manifests, HPKE (RFC 9180) with ML-KEM-768 and X25519", parameter: "0x647a",
		functions: []cdx.CryptoFunction{cdx.CryptoFunctionKeygen, cdx.CryptoFunctionEncapsulate, cdx.CryptoFunctionDecapsulate},
		classical: 192, quantum: 3, parts: []Algorithm{MLKEM768, X25519, HKDFSHA512, AES256GCM},
	},
	{
		algorithm: HPKEPure, kind: cdx.CryptoPrimitiveKEM, what: "sealing of SealedCredential manifests, HPKE (RFC 9180) with ML-KEM-768", parameter: "0x0041",
		functions: []cdx.CryptoFunction{cdx.CryptoFunctionKeygen, cdx.CryptoFunctionEncapsulate, cdx.CryptoFunctionDecapsulate},
		classical: 192, quantum: 3, parts: []Algorithm{MLKEM768, HKDFSHA512, AES256GCM},
	},
	{
		algorithm: GroupHybrid, kind: cdx.CryptoPrimitiveCombiner, what: "key exchange of TLS 1.3", parameter: "0x11ec", group: true,
		functions: []cdx.CryptoFunction{cdx.CryptoFunctionKeygen, cdx.CryptoFunctionEncapsulate, cdx.CryptoFunctionDecapsulate},
		classical: 192, quantum: 3, parts: []Algorithm{MLKEM768, X25519},
	},
	{
		algorithm: GroupX25519, kind: cdx.CryptoPrimitiveKeyAgree, what: "key exchange of TLS 1.3, for clients without the hybrid", parameter: "0x001d", curve: "Curve25519", group: true,
		functions: []cdx.CryptoFunction{cdx.CryptoFunctionKeygen, cdx.CryptoFunctionKeyderive}, classical: 128, parts: []Algorithm{X25519},
	},
	{
		algorithm: GroupSecp256r1, kind: cdx.CryptoPrimitiveKeyAgree, what: "key exchange of TLS 1.3, for clients without the hybrid", parameter: "0x0017", curve: "P-256", group: true,
		oid:       "1.2.840.10045.3.1.7",
		functions: []cdx.CryptoFunction{cdx.CryptoFunctionKeygen, cdx.CryptoFunctionKeyderive}, classical: 128,
	},
	{
		algorithm: GroupSecp384r1, kind: cdx.CryptoPrimitiveKeyAgree, what: "key exchange of TLS 1.3, for clients without the hybrid", parameter: "0x0018", curve: "P-384", group: true,
		oid:       "1.3.132.0.34",
		functions: []cdx.CryptoFunction{cdx.CryptoFunctionKeygen, cdx.CryptoFunctionKeyderive}, classical: 192,
	},
}

func algorithmRef(a Algorithm) string {
	for _, p := range primitives {
		if p.algorithm == a {
			return p.ref()
		}
	}
	return ""
}

// ref returns the reference of the component. TLS groups have a prefix, because the name of one
// differs from its algorithm's name only in case.
func (p primitive) ref() string {
	if p.group {
		return "tls-group/" + string(p.algorithm)
	}
	return "algorithm/" + strings.ToLower(string(p.algorithm))
}

func refs(of []primitive) []string {
	out := make([]string, len(of))
	for i, p := range of {
		out[i] = p.ref()
	}
	return out
}

func refsOf(of []Algorithm) []string {
	var out []string
	for _, a := range of {
		out = append(out, algorithmRef(a))
	}
	return out
}

func (p primitive) component() cdx.Component {
	properties := &cdx.CryptoAlgorithmProperties{
		Primitive:              p.kind,
		ParameterSetIdentifier: p.parameter,
		Curve:                  p.curve,
		ExecutionEnvironment:   cdx.CryptoExecutionEnvironmentSoftwarePlainRAM,
		CertificationLevel:     &[]cdx.CryptoCertificationLevel{cdx.CryptoCertificationLevelNone},
		Mode:                   p.mode,
		CryptoFunctions:        &p.functions,
	}
	if p.quantum >= 0 {
		properties.ClassicalSecurityLevel, properties.NistQuantumSecurityLevel = &p.classical, &p.quantum
	}
	return cdx.Component{
		BOMRef: p.ref(), Type: cdx.ComponentTypeCryptographicAsset, Name: string(p.algorithm), Description: p.what,
		CryptoProperties: &cdx.CryptoProperties{AssetType: cdx.CryptoAssetTypeAlgorithm, AlgorithmProperties: properties, OID: p.oid},
	}
}

// tlsComponent returns the component for TLS with the groups in use. Its cipher suites are those of
// TLS 1.3 in Go, all of which are suitable.
func tlsComponent(used []primitive) (cdx.Component, bool) {
	var groups []cdx.BOMReference
	for _, p := range used {
		if p.group {
			groups = append(groups, cdx.BOMReference(p.ref()))
		}
	}
	if len(groups) == 0 {
		return cdx.Component{}, false
	}
	suite := func(name string, identifiers ...string) cdx.CipherSuite {
		return cdx.CipherSuite{Name: name, Identifiers: &identifiers}
	}
	return cdx.Component{
		BOMRef: "protocol/tls", Type: cdx.ComponentTypeCryptographicAsset, Name: "TLS 1.3", Description: "how clients and the service talk, RFC 8446",
		CryptoProperties: &cdx.CryptoProperties{
			AssetType: cdx.CryptoAssetTypeProtocol,
			ProtocolProperties: &cdx.CryptoProtocolProperties{
				Type: cdx.CryptoProtocolTypeTLS, Version: "1.3", CryptoRefArray: &groups,
				CipherSuites: &[]cdx.CipherSuite{
					suite("TLS_AES_128_GCM_SHA256", "0x13", "0x01"),
					suite("TLS_AES_256_GCM_SHA384", "0x13", "0x02"),
					suite("TLS_CHACHA20_POLY1305_SHA256", "0x13", "0x03"),
				},
			},
		},
	}, true
}
