package sealedsecrets

import (
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"

	utiljson "k8s.io/apimachinery/pkg/util/json"
)

// ParseKeys reads the sealing keys in one YAML or JSON document of a backup, a Secret or a list of
// them. It skips objects that are not marked as a sealing key. A marked Secret without an RSA key
// in tls.key is an error, because the backup is damaged.
func ParseKeys(doc []byte) ([]*rsa.PrivateKey, error) {
	var keys []*rsa.PrivateKey
	err := each(doc, func(t typeMeta, object []byte) error {
		if _, marked := t.Metadata.Labels[KeyLabel]; !marked || t.APIVersion != "v1" || t.Kind != "Secret" {
			return nil
		}
		name := "Secret " + t.Metadata.title()
		var s struct {
			Data map[string][]byte `json:"data"`
		}
		if err := utiljson.Unmarshal(object, &s); err != nil { // the cause may quote a key
			return fmt.Errorf("%s: its data is not base64", name)
		}
		defer func() {
			for _, v := range s.Data {
				clear(v)
			}
		}()
		key := parseKey(s.Data["tls.key"])
		if key == nil {
			return fmt.Errorf("%s: has no RSA private key in PEM as tls.key", name)
		}
		keys = append(keys, key)
		return nil
	})
	return keys, err
}

// parseKey reads PKCS#1, which the controller writes, or PKCS#8. It returns nil for anything else.
func parseKey(file []byte) *rsa.PrivateKey {
	block, _ := pem.Decode(file)
	if block == nil {
		return nil
	}
	defer clear(block.Bytes)
	switch block.Type {
	case "RSA PRIVATE KEY":
		key, err := x509.ParsePKCS1PrivateKey(block.Bytes)
		if err != nil {
			return nil
		}
		return key
	case "PRIVATE KEY":
		key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
		if err != nil {
			return nil
		}
		k, _ := key.(*rsa.PrivateKey)
		return k
	}
	return nil
}
