package memory_test

import (
	"encoding/json"
	"os"
	"runtime/debug"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/v1beta1"
	"github.com/latticekeep/latticekeep/internal/memory"
	"github.com/latticekeep/latticekeep/test/machine"
)

// The object has three values of some 100 bytes, and what an API server adds.
func TestAnObjectTakesTheMemoryThatTheFormulaSays(t *testing.T) {
	const objects = 1000
	text := `{"apiVersion":"latticekeep.dev/v1beta1","kind":"SealedCredential","metadata":{"name":"database","namespace":"shop","uid":"0d3c4c1e-8a4f-4b3e-9a3e-1f2c3d4e5f60",
"resourceVersion":"12345","generation":3,"creationTimestamp":"2026-11-25T00:00:00Z","labels":{"app":"shop"},"annotations":{"team":"shop"},"finalizers":["latticekeep.dev/vault"]},
"spec":{"sealed":{"version":1,"keyID":"` + strings.Repeat("a", 64) + `","values":{
"host":{"sealedAt":"2026-11-25T00:00:00Z","data":"DATA"},"username":{"sealedAt":"2026-11-25T00:00:00Z","data":"DATA"},"password":{"sealedAt":"2026-11-25T00:00:00Z","data":"DATA"}}},
"target":{"name":"database"}},"status":{"observedGeneration":3,"conditions":[
{"type":"Ready","status":"True","lastTransitionTime":"2026-11-25T00:00:00Z","reason":"Synced","message":"the target has version 3"},
{"type":"Stalled","status":"False","lastTransitionTime":"2026-11-25T00:00:00Z","reason":"Synced","message":""}]}}`
	text = strings.ReplaceAll(text, "DATA", strings.Repeat("A", 1664))
	took := machine.Heap(func() []*v1beta1.SealedCredential {
		all := make([]*v1beta1.SealedCredential, objects)
		for i := range all {
			all[i] = new(v1beta1.SealedCredential)
			if err := json.Unmarshal([]byte(text), all[i]); err != nil {
				t.Fatal(err)
			}
		}
		return all
	})
	machine.CheckHeap(t, objects, took, memory.Deployment{Objects: objects}.Need()-memory.Deployment{}.Need())
}

func TestAShareFitsToTheLimit(t *testing.T) {
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(100 << 20))
	for _, c := range []struct {
		part, each int64
		most, want int
	}{{4, 19 << 20, 8, 1}, {4, 10 << 20, 8, 2}, {4, 1 << 20, 8, 8}, {4, 1 << 30, 8, 1}, {4, 1, 0, 1}} {
		if got := memory.Share(c.part, c.each, c.most); got != c.want {
			t.Errorf("%+v: %d", c, got)
		}
	}
}

// The chart's default limit serves what its comment says.
func TestTheChartGivesTheMemoryThatItSays(t *testing.T) {
	text, err := os.ReadFile("../../charts/latticekeep/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var values struct {
		Server struct {
			Resources struct{ Requests, Limits struct{ Memory string } }
		}
	}
	if err := yaml.Unmarshal(text, &values); err != nil {
		t.Fatal(err)
	}
	if r := values.Server.Resources; r.Requests.Memory != "128Mi" || r.Limits.Memory != "1Gi" {
		t.Error("compare the comment with the formula again:", r)
	}
	if n := (memory.Deployment{Credentials: 10_000, Rows: 30_000, Tenants: 10}).Need(); n > 128<<20 {
		t.Errorf("the request is less than %d bytes", n)
	}
	if n := (memory.Deployment{Credentials: 50_000, Rows: 250_000, Tenants: 1000, Objects: 50_000}).Need(); n > 1<<30 {
		t.Errorf("the limit is less than %d bytes", n)
	}
}
