package report

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/latticekeep/latticekeep/internal/fault"
)

func inventory() Inventory {
	made := time.Date(2026, 9, 1, 8, 30, 0, 0, time.UTC)
	return Inventory{
		Tenant: "ten_mfrggzdfmztwq2lknnwg23tpoa", Program: "latticekeep", Version: "0.5.0", At: headTime,
		Algorithms: []Algorithm{SHA256, MLKEM768, MLDSA65, AES256GCM, HKDFSHA512, HMACSHA512, SHA3256, Argon2id, HPKEHybrid, GroupHybrid, GroupX25519, MLKEM768},
		Keys: []Key{
			{ID: "tenant-signing/1", Name: "signing key", Type: PrivateKey, Algorithm: MLDSA65, State: Active, CreatedAt: made, SecuredBy: "AWS KMS", WrappedBy: AES256GCM},
			{ID: "key_orders/2", Name: "named key, version 2", Type: PrivateKey, Algorithm: MLKEM768, State: Active, CreatedAt: made, ExpiresAt: made.AddDate(0, 3, 0), SecuredBy: "AWS KMS", WrappedBy: AES256GCM},
			{ID: "key_orders/1", Name: "named key, version 1", Type: PrivateKey, Algorithm: MLKEM768, State: Deactivated, CreatedAt: made.AddDate(0, -3, 0), SecuredBy: "AWS KMS", WrappedBy: AES256GCM},
			{ID: "tenant-wrapping/1", Name: "wrapping key", Type: SecretKey, Algorithm: AES256GCM, State: Active, Size: 256, CreatedAt: made, SecuredBy: "AWS KMS"},
		},
	}
}

func cbom(t *testing.T, in Inventory) []byte {
	t.Helper()
	b, err := CBOM(in)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// cycloneDX returns the schema of CycloneDX 1.6, which the module cyclonedx-go contains.
func cycloneDX(t *testing.T) *jsonschema.Schema {
	t.Helper()
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "github.com/CycloneDX/cyclonedx-go").Output()
	if err != nil {
		t.Fatalf("where is cyclonedx-go: %v", err)
	}
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	for _, name := range []string{"bom-1.6.schema.json", "spdx.schema.json", "jsf-0.82.schemax.json"} {
		b, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(out)), "schema", name))
		if err != nil {
			t.Fatal(err)
		}
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(b))
		if err != nil {
			t.Fatal(err)
		}
		url := "http://cyclonedx.org/schema/" + strings.Replace(name, "schemax", "schema", 1)
		if err := c.AddResource(url, doc); err != nil {
			t.Fatal(err)
		}
	}
	s, err := c.Compile("http://cyclonedx.org/schema/bom-1.6.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestCBOMIsValid(t *testing.T) {
	schema := cycloneDX(t)
	every := inventory()
	every.Algorithms = nil
	for _, p := range primitives {
		every.Algorithms = append(every.Algorithms, p.algorithm)
	}
	bare := Inventory{Program: "latticekeep", At: headTime}
	for name, in := range map[string]Inventory{"inventory": inventory(), "every algorithm": every, "bare": bare} {
		doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(cbom(t, in)))
		if err != nil {
			t.Fatal(err)
		}
		if err := schema.Validate(doc); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	doc, err := jsonschema.UnmarshalJSON(bytes.NewReader(bytes.Replace(cbom(t, inventory()), []byte(`"kem"`), []byte(`"magic"`), 1)))
	if err != nil {
		t.Fatal(err)
	}
	if schema.Validate(doc) == nil {
		t.Error("a primitive that CycloneDX does not have is valid")
	}
}

func TestCBOMHoldsAlgorithmsAndKeys(t *testing.T) {
	b := cbom(t, inventory())
	golden(t, "testdata/inventory.cbom.json", b)
	var bom cdx.BOM
	if err := json.Unmarshal(b, &bom); err != nil {
		t.Fatal(err)
	}
	components := make(map[string]cdx.Component)
	for _, c := range *bom.Components {
		if _, twice := components[c.BOMRef]; twice {
			t.Errorf("%s is there twice", c.BOMRef)
		}
		components[c.BOMRef] = c
	}
	for ref, want := range map[string]struct {
		oid     string
		quantum int
	}{
		"algorithm/ml-kem-768":      {"2.16.840.1.101.3.4.4.2", 3},
		"algorithm/ml-dsa-65":       {"2.16.840.1.101.3.4.3.18", 3},
		"algorithm/aes-256-gcm":     {"2.16.840.1.101.3.4.1.46", 5},
		"algorithm/hkdf-sha-512":    {"1.2.840.113549.1.9.16.3.30", 5},
		"algorithm/hmac-sha-512":    {"1.2.840.113549.2.11", 5},
		"algorithm/sha3-256":        {"2.16.840.1.101.3.4.2.8", 2},
		"algorithm/mlkem768-x25519": {"", 3},
		"algorithm/x25519":          {"1.3.101.110", 0}, // a part of the hybrids
		"tls-group/X25519MLKEM768":  {"", 3},
		"tls-group/x25519":          {"", 0},
	} {
		c, ok := components[ref]
		if !ok || c.CryptoProperties.OID != want.oid || c.CryptoProperties.AlgorithmProperties.NistQuantumSecurityLevel == nil ||
			*c.CryptoProperties.AlgorithmProperties.NistQuantumSecurityLevel != want.quantum {
			t.Errorf("%s is %+v", ref, c.CryptoProperties)
		}
	}
	if _, ok := components["algorithm/argon2id"]; !ok {
		t.Error("argon2id is not there")
	}
	if p := components["protocol/tls"].CryptoProperties.ProtocolProperties; !slices.Equal(*p.CryptoRefArray, []cdx.BOMReference{"tls-group/X25519MLKEM768", "tls-group/x25519"}) {
		t.Errorf("TLS has %v", *p.CryptoRefArray)
	}
	k := components["key/key_orders/2"].CryptoProperties.RelatedCryptoMaterialProperties
	if k.State != "active" || k.Type != "private-key" || k.ID != "key_orders/2" || k.AlgorithmRef != "algorithm/ml-kem-768" || k.CreationDate != "2026-09-01T08:30:00Z" ||
		k.ExpirationDate != "2026-12-01T08:30:00Z" || k.SecuredBy.Mechanism != "AWS KMS" || k.SecuredBy.AlgorithmRef != "algorithm/aes-256-gcm" || k.Value != "" {
		t.Errorf("the key is %+v", k)
	}
	// Every reference has a target.
	for _, d := range *bom.Dependencies {
		refs := []string{}
		if d.Dependencies != nil {
			refs = append(refs, *d.Dependencies...)
		}
		if d.Provides != nil {
			refs = append(refs, *d.Provides...)
		}
		for _, ref := range refs {
			if _, ok := components[ref]; !ok {
				t.Errorf("%s has %s, which is not there", d.Ref, ref)
			}
		}
	}
	for ref, c := range components {
		if m := c.CryptoProperties.RelatedCryptoMaterialProperties; m != nil && components[string(m.AlgorithmRef)].BOMRef == "" {
			t.Errorf("the algorithm of %s is not there", ref)
		}
	}
}

func TestCBOMIsTheSameBytes(t *testing.T) {
	in := inventory()
	want := cbom(t, in)
	slices.Reverse(in.Keys)
	slices.Reverse(in.Algorithms)
	in.At = in.At.In(time.FixedZone("elsewhere", 3600))
	if !bytes.Equal(cbom(t, in), want) {
		t.Error("the order of the inventory, or the zone, changes the document")
	}
	in.Keys[0].State = Suspended
	got := cbom(t, in)
	serial := func(b []byte) string {
		var bom cdx.BOM
		if err := json.Unmarshal(b, &bom); err != nil {
			t.Fatal(err)
		}
		return bom.SerialNumber
	}
	if serial(got) == serial(want) || !strings.HasPrefix(serial(got), "urn:uuid:") {
		t.Errorf("another inventory has the serial number %s", serial(got))
	}
}

func TestCBOMRefusesWhatItCannotSay(t *testing.T) {
	for name, spoil := range map[string]func(*Inventory){
		"algorithm":        func(in *Inventory) { in.Algorithms = append(in.Algorithms, "ROT13") },
		"key's algorithm":  func(in *Inventory) { in.Keys[0].Algorithm = "" },
		"wrap":             func(in *Inventory) { in.Keys[0].WrappedBy = "ROT13" },
		"id":               func(in *Inventory) { in.Keys[0].ID = "" },
		"id of two":        func(in *Inventory) { in.Keys[0].ID = in.Keys[1].ID },
		"state":            func(in *Inventory) { in.Keys[0].State = "" },
		"type":             func(in *Inventory) { in.Keys[0].Type = "" },
		"time":             func(in *Inventory) { in.At = time.Time{} },
		"name of programs": func(in *Inventory) { in.Program = "" },
	} {
		in := inventory()
		spoil(&in)
		if b, err := CBOM(in); b != nil || fault.Of(err) != fault.Internal {
			t.Errorf("%s: %v", name, err)
		}
	}
}
