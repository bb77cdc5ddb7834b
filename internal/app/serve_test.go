package app

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"github.com/latticekeep/latticekeep/controllers"
	"github.com/latticekeep/latticekeep/internal/config"
)

func TestTheOwnNamespaceIsThatOfThePod(t *testing.T) {
	file := filepath.Join(t.TempDir(), "namespace")
	if err := os.WriteFile(file, []byte("of-the-pod\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ configured, kubeconfig, file, want string }{
		{"", "", file, "of-the-pod"},
		{"configured", "", file, "configured"},
		{"configured", "/kubeconfig", file, "configured"},
		{"", "/kubeconfig", file, controllers.DefaultNamespace}, // for another cluster than the pod's
		{"", "", file + ".none", controllers.DefaultNamespace},
	} {
		var s config.Config
		s.Kubernetes.Namespace, s.Kubernetes.Kubeconfig = c.configured, c.kubeconfig
		if got := ownNamespace(s, c.file); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
}

func TestTheUseOfSealingKeysIsThatOfVaultAndCluster(t *testing.T) {
	errDown := errors.New("down")
	of := func(use map[string]int, err error) sealingKeyUse {
		return func(context.Context) (map[string]int, error) { return maps.Clone(use), err }
	}
	vault := of(map[string]int{"old": 2, "both": 3}, nil)
	for name, c := range map[string]struct {
		vault, cluster sealingKeyUse
		want           map[string]int
		err            error
	}{
		"no cluster":           {vault, nil, map[string]int{"old": 2, "both": 3}, nil},
		"both":                 {vault, of(map[string]int{"both": 4, "new": 1}, nil), map[string]int{"old": 2, "both": 4, "new": 1}, nil},
		"fewer there":          {vault, of(map[string]int{"both": 1}, nil), map[string]int{"old": 2, "both": 3}, nil},
		"an unknown cluster":   {vault, of(nil, errDown), nil, errDown},
		"a vault that is down": {of(nil, errDown), of(map[string]int{"new": 1}, nil), nil, errDown},
	} {
		got, err := eitherUse(c.vault, c.cluster)(t.Context())
		if !maps.Equal(got, c.want) || !errors.Is(err, c.err) {
			t.Errorf("%s: %v %v", name, got, err)
		}
	}
}
