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

// Inventory is what [CBOM] renders: the algorithms that a deployment uses and
// the keys of one tenant in it.
type Inventory struct {
	Tenant     authz.TenantID
	Program    string    // name of what wrote it
	Version    string    // of the program
	At         time.Time // as of when
	Algorithms []Algorithm
	Keys       []Key
}

// Key is a live key by its id. Nothing here is secret, and nothing is derived
// from what is.
type Key struct {
	ID        string // in this inventory; of a version of a key, name and version together
	Name      string // what it is for, in a word or two
	Type      KeyType
	Algorithm Algorithm
	State     KeyState
	Size      int // bits; 0 is not said
	CreatedAt time.Time
	ExpiresAt time.Time // when it is rotated next, at the latest; zero is never
	SecuredBy string    // where its custody lies: "AWS KMS", "local key file"
	WrappedBy Algorithm // what wraps it; "" when nothing does
}

// KeyType is what kind of material a key is.
type KeyType string

// The types, as CycloneDX names them.
const (
	PrivateKey KeyType = "private-key" // of a pair; its public part is not listed apart
	PublicKey  KeyType = "public-key"
	SecretKey  KeyType = "secret-key"
)

// KeyState is a state of NIST SP 800-57.
type KeyState string

// The states that a live key can be in. One that is no longer used to encrypt or
// to sign but still decrypts or verifies is deactivated.
const (
	PreActivation KeyState = "pre-activation"
	Active        KeyState = "active"
	Suspended     KeyState = "suspended"
	Deactivated   KeyState = "deactivated"
)

// CBOM renders a cryptographic bill of materials, CycloneDX 1.6 as JSON: a
// component for each algorithm, for TLS when a group of it is among them, and
// for each key. Lists may be in any order and may repeat algorithms: what is
// written is sorted, and the same inventory gives the same bytes. An algorithm
// that is not one of the constants, or a key without an id, is
// [fault.Internal], since the inventory is made by this program.
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
	// The serial number is of what the document says, so that it changes when
	// that does and not otherwise.
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

// dependencies says what the program provides, and which algorithms are made of
// which. CycloneDX wants those without parts listed too.
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

// component is the key. Everything in it was checked by [algorithmsOf].
func (k Key) component() cdx.Component {
	m := &cdx.RelatedCryptoMaterialProperties{
		Type:         cdx.RelatedCryptoMaterialType(k.Type),
		ID:           k.ID,
		State:        cdx.CryptoKeyState(k.State),
		AlgorithmRef: cdx.BOMReference(algorithmRef(k.Algorithm)),
		CreationDate: timestamp(k.CreatedAt),
		// A key here is in use from when it is made.
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

// timestamp is "" for no time.
func timestamp(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}
