package charts_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/latticekeep/latticekeep/internal/config"
)

// own are the settings that the chart decides, so that its values have no place for them; kubernetes.kubeconfig and tls.terminated are for
// servers outside of a cluster and behind a proxy.
var own = []string{
	"listen", "dataDir", "operations.listen", "operations.profiling", "store.passwordFile", "systemKeyFile", "systemKeySecret", "mail.smtp.passwordFile",
	"tls.certFile", "tls.keyFile", "tls.secretName", "tls.terminated", "kubernetes.kubeconfig", "kubernetes.namespace",
	"kubernetes.webhook", "compliance.catalogues", "backup.scratch",
}

// The schema of the values has every setting of the program but the chart's own, by the same name, and no other.
func TestValuesHaveEverySetting(t *testing.T) {
	text, err := os.ReadFile("latticekeep/values.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	type schema struct {
		Properties map[string]schema
	}
	var values schema
	if err := json.Unmarshal(text, &values); err != nil {
		t.Fatal(err)
	}
	var inSchema []string
	var walk func(s schema, path string)
	walk = func(s schema, path string) {
		for name, p := range s.Properties {
			if len(p.Properties) == 0 {
				inSchema = append(inSchema, path+name)
			}
			walk(p, path+name+".")
		}
	}
	walk(values.Properties["config"], "")

	settings := settingsOf(reflect.TypeFor[config.Config](), "")
	for _, name := range own {
		i := slices.Index(settings, name)
		if i < 0 {
			t.Errorf("there is no setting %s", name)
			continue
		}
		settings = slices.Delete(settings, i, i+1)
	}
	slices.Sort(settings)
	slices.Sort(inSchema)
	if !slices.Equal(inSchema, settings) {
		t.Errorf("values.schema.json has under config\n%v\nthe program reads\n%v", inSchema, settings)
	}
}

// settingsOf returns the name of each setting, such as kms.cacheTTL.
func settingsOf(s reflect.Type, path string) (names []string) {
	for i := range s.NumField() {
		f := s.Field(i)
		name := path + f.Tag.Get("yaml")
		if f.Type.Kind() == reflect.Struct {
			names = append(names, settingsOf(f.Type, name+".")...)
		} else {
			names = append(names, name)
		}
	}
	return names
}

// The program starts with what the chart makes of any values.
func TestProgramReadsTheRenderedConfiguration(t *testing.T) {
	everyRendering(t, func(t *testing.T, all []unstructured.Unstructured) {
		path := filepath.Join(t.TempDir(), "config.yaml")
		text := field(t, find(all, "ConfigMap", "latticekeep-config"), "data", "config.yaml").(string)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := config.Load(path, nil, nil); err != nil {
			t.Errorf("%v\n%s", err, text)
		}
	})
}
