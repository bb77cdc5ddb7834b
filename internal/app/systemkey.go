package app

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/durable"
)

// deliverSystemKey writes the first system key to the configured Secret or file, and returns once
// it is stored there.
func (s *service) deliverSystemKey(ctx context.Context, to config.Config, key string) error {
	const written = "the first system key is written: move it to where you keep passwords"
	if to.SystemKeySecret == "" {
		err := writeSystemKey(to.SystemKeyFile, key)
		if err == nil {
			s.logger.Info(written, "file", to.SystemKeyFile)
		}
		return err
	}
	namespace := s.operator.Namespace
	err := createSystemKey(ctx, s.cluster, namespace, to.SystemKeySecret, key)
	if err == nil {
		s.logger.Info(written, "namespace", namespace, "secret", to.SystemKeySecret)
	}
	return err
}

const (
	systemKeyData     = "system-key"     // name of the key in the Secret
	systemKeyPatience = 15 * time.Second // time that the API server has to store the Secret
)

// createSystemKey creates a Secret with the key. It fails if the Secret already exists.
func createSystemKey(ctx context.Context, cluster *rest.Config, namespace, name, key string) error {
	core, err := typedcorev1.NewForConfig(cluster)
	if err != nil {
		return fmt.Errorf("making a client for systemKeySecret: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, systemKeyPatience)
	defer cancel()
	_, err = core.Secrets(namespace).Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Type:       corev1.SecretTypeOpaque,
		Data:       map[string][]byte{systemKeyData: []byte(key)},
	}, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("the Secret of systemKeySecret exists already, and this deployment has no system key: "+
			"what is in it belongs elsewhere, or is left over from a start that was cut off. Look at it, and start again after "+
			"`kubectl delete secret -n %s %s`: %w", namespace, name, err)
	} else if err != nil {
		return fmt.Errorf("creating the Secret of systemKeySecret: %w", err)
	}
	return nil
}

const systemKeyThere = "systemKeyFile exists already, and this deployment has no system key: " +
	"what is in it belongs elsewhere, or is left over from a start that was cut off. Move it away and start again"

// refuseSystemKeyFile fails if the file for the first system key already exists. An empty path
// names no file.
func refuseSystemKeyFile(path string) error {
	if path == "" {
		return nil
	}
	if _, err := os.Lstat(path); err == nil {
		return errors.New(systemKeyThere)
	}
	return nil
}

// writeSystemKey writes the key to a new file and returns once the file is durable. It fails if the
// file already exists.
func writeSystemKey(path, key string) error {
	err := durable.WriteNew(path, []byte(key+"\n"))
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s: %w", systemKeyThere, err)
	} else if err != nil {
		return fmt.Errorf("creating systemKeyFile: %w", err)
	}
	return nil
}
