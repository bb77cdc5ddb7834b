package main

import (
	"os"
	"reflect"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// The guide of the CSI driver shows the manifest that this program applies, but for the image and its arguments.
func TestTheGuideHasTheManifestOfTheRun(t *testing.T) {
	text, err := os.ReadFile("../../docs/guides/csi.md")
	if err != nil {
		t.Fatal(err)
	}
	_, block, _ := strings.Cut(string(text), "```yaml\n")
	block, _, _ = strings.Cut(block, "```")
	applied, err := os.ReadFile("manifests/csi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	block = strings.ReplaceAll(block, "registry.example.org/ledger", workloadImage+"\n      args: [follow, /credentials]")
	if shown, want := objectsOf(t, block), objectsOf(t, string(applied)); len(want) == 0 || !reflect.DeepEqual(shown, want) {
		t.Error("the guide shows other objects")
	}
}

// The pod of the agent comes from its guide.
func TestThePodOfTheAgentIsThatOfItsGuide(t *testing.T) {
	t.Chdir("../..")
	pod, err := fromGuide()
	if err != nil {
		t.Fatal(err)
	}
	for _, left := range []string{"orders", "registry.example.org", "0.1.0"} {
		if strings.Contains(pod, left) {
			t.Errorf("it still has %s:\n%s", left, pod)
		}
	}
	if objects := objectsOf(t, pod); len(objects) != 2 || objects[0]["kind"] != "ConfigMap" || objects[1]["kind"] != "Pod" {
		t.Error(objects)
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
