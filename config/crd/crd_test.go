package crd_test

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"strconv"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/config/crd"
)

// released has the SHA-256 of the spec of each schema that was in use, by its number. A release adds its own.
var released = map[int]string{
	0: "654e4f11e8ba1a54d1728c1eb70c4e092d6626caa9027d88d9562b8ae58d48a2", // before schemas had numbers: v1alpha1 alone
}

// A program keeps what has a higher number than its own, so a schema that differs from a released one has a higher number.
func TestAnotherSchemaHasAnotherNumber(t *testing.T) {
	var definition struct {
		Metadata struct{ Annotations map[string]string }
		Spec     any
	}
	if err := yaml.Unmarshal(crd.YAML, &definition); err != nil {
		t.Fatal(err)
	}
	number, err := strconv.Atoi(definition.Metadata.Annotations["latticekeep.dev/schema"])
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(definition.Spec)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(text)
	digest := hex.EncodeToString(sum[:])
	for n, was := range released {
		if same := digest == was; same != (n == number) || n > number {
			t.Errorf("schema %d (%s) was released, and this is schema %d (%s): raise latticekeep.dev/schema in api/v1beta1 above every released one", n, was, number, digest)
		}
	}
	if definition.Metadata.Annotations["helm.sh/resource-policy"] != "keep" {
		t.Error("an upgrade of a release that has the CRD in its manifest would delete it, and every object")
	}
}
