package main

import (
	"os"
	"reflect"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// The guides show the manifests that this program applies, but for the images.
func TestTheGuidesHaveTheManifestsOfTheRun(t *testing.T) {
	images := strings.NewReplacer("registry.example.org/ledger", workloadImage, "latticekeep/latticekeep:0.1.0", productImage)
	for guide, manifest := range map[string]string{"csi.md": "csi.yaml", "agent.md": "agent.yaml"} {
		text, err := os.ReadFile("../../docs/guides/" + guide)
		if err != nil {
			t.Fatal(err)
		}
		_, block, _ := strings.Cut(string(text), "```yaml\n")
		block, _, _ = strings.Cut(block, "```")
		applied, err := os.ReadFile("manifests/" + manifest)
		if err != nil {
			t.Fatal(err)
		}
		if shown, want := objectsOf(t, images.Replace(block)), objectsOf(t, string(applied)); len(want) == 0 || !reflect.DeepEqual(shown, want) {
			t.Errorf("%s shows other objects than %s has", guide, manifest)
		}
	}
}

func objectsOf(t *testing.T, text string) (all []map[string]any) {
	t.Helper()
	for document := range strings.SplitSeq(text, "\n---\n") {
		var o map[string]any
		if err := yaml.Unmarshal([]byte(document), &o); err != nil {
			t.Fatal(err)
		}
		all = append(all, o)
	}
	return all
}
