package report

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/google/uuid"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
)

// Inventory is the input of [CBOM]: the algorithms that a deployment uses and the keys of one
// tenant.
type Inventory struct {
	Tenant     authz.TenantID
	Program    string    // name of the program that writes it
	Version    string    // version of the program
	At         time.Time // time of the inventory
	Algorithms []Algorithm
	Keys       []Key
}

// Key describes a live key by its id. It contains no secret and nothing derived from one.
type Key struct {
	ID        string // id in this inventory; for a version of a key, its name and version together
	Name      string // purpose, in a word or two
	Type      KeyType
	Algorithm Algorithm
	State     KeyState
	Size      int // bits; 0: unknown
	CreatedAt time.Time
	ExpiresAt time.Time // latest time of the next rotation; zero: never
	SecuredBy string    // custody of the key: "AWS KMS", "local key file"
	WrappedBy Algorithm // algorithm that wraps the key; "" when it is not wrapped
}

// KeyType is the kind of material of a key.
type KeyType string

// The types, as CycloneDX names them.
const (
	PrivateKey KeyType = "private-key" // private key of a pair; the public key is not listed separately
	PublicKey  KeyType = "public-key"
	SecretKey  KeyType = "secret-key"
)

// KeyState is a key state of NIST SP 800-57.
type KeyState string

// The states of a live key. A key is deactivated when it no longer encrypts or signs but still
// decrypts or verifies.
const (
	PreActivation KeyState = "pre-activation"
	Active        KeyState = "active"
	Suspended     KeyState = "suspended"
	Deactivated   KeyState = "deactivated"
)

// CBOM renders a cryptographic bill of materials, CycloneDX 1.6 as JSON. It has a component for
// each algorithm, for TLS if one of its groups is among them, and for each key. Lists may be in any
// order and may repeat algorithms: the output is sorted, and the same inventory gives the same
// bytes. Since this program makes the inventory, an algorithm that is not one of the constants, or
// a key without an id, is [fault.Internal].
func CBOM(in Inventory) ([]byte, error) {
	if in.At.IsZero() || in.Program == "" {
		return nil, fault.New(fault.Internal, "an inventory needs a time and the program that it is of")
	}
	keys := slices.Clone(in.Keys)
	slices.SortFunc(keys, func(a, b Key) int { return cmp.Compare(a.ID, b.ID) })
	used, err := algorithmsOf(in.Algorithms, keys)
	if err != nil {
		return nil, err
	}

	const program = "program"
	components := []cdx.Component{}
	for _, a := range used {
		components = append(components, a.component())
	}
	provides := refs(used)
	if p, ok := tlsComponent(used); ok {
		components, provides = append(components, p), append(provides, p.BOMRef)
	}
	for _, k := range keys {
		components = append(components, k.component())
		provides = append(provides, k.ref())
	}

	bom := cdx.BOM{
		JSONSchema:  "http://cyclonedx.org/schema/bom-1.6.schema.json",
		BOMFormat:   cdx.BOMFormat,
		SpecVersion: cdx.SpecVersion1_6,
		Version:     1,
		Metadata: &cdx.Metadata{
			Timestamp:  in.At.UTC().Format(time.RFC3339),
			Lifecycles: &[]cdx.Lifecycle{{Phase: cdx.LifecyclePhaseOperations}},
			Component: &cdx.Component{
				BOMRef: program, Type: cdx.ComponentTypeApplication, Name: in.Program, Version: in.Version,
			},
			Properties: &[]cdx.Property{{Name: "latticekeep:tenant", Value: string(in.Tenant)}},
		},
		Components:   &components,
		Dependencies: dependencies(program, provides, used),
	}
	body, err := encodeBOM(bom)
	if err != nil {
		return nil, err
	}
	// The serial number is derived from the contents, so it changes exactly when they do.
	space := uuid.NewSHA1(uuid.NameSpaceURL, []byte("https://latticekeep.dev/ns/cbom/v1"))
	bom.SerialNumber = uuid.NewSHA1(space, body).URN()
	return encodeBOM(bom)
}

func encodeBOM(bom cdx.BOM) ([]byte, error) {
	var b bytes.Buffer
	if err := cdx.NewBOMEncoder(&b, cdx.BOMFileFormatJSON).SetPretty(true).SetEscapeHTML(false).Encode(&bom); err != nil {
		return nil, fmt.Errorf("encoding the inventory: %w", err)
	}
	return b.Bytes(), nil
}

// dependencies lists what the program provides, and the parts of each algorithm. CycloneDX requires
// algorithms without parts in the list too.
func dependencies(program string, provides []string, used []primitive) *[]cdx.Dependency {
	out := []cdx.Dependency{{Ref: program, Provides: &provides}}
	for _, a := range used {
		d := cdx.Dependency{Ref: a.ref()}
		if parts := slices.DeleteFunc(refsOf(a.parts), func(ref string) bool { return !slices.Contains(provides, ref) }); len(parts) > 0 {
			d.Dependencies = &parts
		}
		out = append(out, d)
	}
	return &out
}

func (k Key) ref() string { return "key/" + k.ID }

// component returns the component for the key. [algorithmsOf] has checked its fields.
func (k Key) component() cdx.Component {
	m := &cdx.RelatedCryptoMaterialProperties{
		Type:         cdx.RelatedCryptoMaterialType(k.Type),
		ID:           k.ID,
		State:        cdx.CryptoKeyState(k.State),
		AlgorithmRef: cdx.BOMReference(algorithmRef(k.Algorithm)),
		CreationDate: timestamp(k.CreatedAt),
		// A key of this product is in use from its creation.
		ActivationDate: timestamp(k.CreatedAt),
		ExpirationDate: timestamp(k.ExpiresAt),
	}
	if k.State == PreActivation {
		m.ActivationDate = ""
	}
	if k.Size > 0 {
		m.Size = &k.Size
	}
	if k.SecuredBy != "" || k.WrappedBy != "" {
		m.SecuredBy = &cdx.SecuredBy{Mechanism: k.SecuredBy}
		if k.WrappedBy != "" {
			m.SecuredBy.AlgorithmRef = cdx.BOMReference(algorithmRef(k.WrappedBy))
		}
	}
	return cdx.Component{
		BOMRef: k.ref(), Type: cdx.ComponentTypeCryptographicAsset, Name: cmp.Or(k.Name, k.ID),
		CryptoProperties: &cdx.CryptoProperties{
			AssetType: cdx.CryptoAssetTypeRelatedCryptoMaterial, RelatedCryptoMaterialProperties: m,
		},
	}
}

// timestamp formats a time, or returns "" for the zero time.
func timestamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}

// algorithmsOf returns the primitives of the named algorithms, of those that the keys use or are
// wrapped with, and of all their parts. Each comes once, in the order of the table. It rejects an
// algorithm that is not in the table.
func algorithmsOf(named []Algorithm, keys []Key) ([]primitive, error) {
	want := slices.Clone(named)
	for i, k := range keys {
		if k.ID == "" || k.Type == "" || k.State == "" || i > 0 && keys[i-1].ID == k.ID {
			return nil, fault.New(fault.Internal, "every key of an inventory needs an id of its own, a type and a state")
		}
		want = append(want, k.Algorithm)
		if k.WrappedBy != "" {
			want = append(want, k.WrappedBy)
		}
	}
	known := make(map[Algorithm]bool)
	for i := 0; i < len(want); i++ { // want grows by the parts
		if known[want[i]] {
			continue
		}
		at := slices.IndexFunc(primitives, func(p primitive) bool { return p.algorithm == want[i] })
		if at < 0 {
			return nil, fault.New(fault.Internal, "the inventory names an algorithm that is not in its table")
		}
		known[want[i]] = true
		want = append(want, primitives[at].parts...)
	}
	return slices.DeleteFunc(slices.Clone(primitives), func(p primitive) bool { return !known[p.algorithm] }), nil
}
