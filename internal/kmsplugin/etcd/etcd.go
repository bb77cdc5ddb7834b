// Package etcd finds out which key ids the objects in etcd name that a KMS v2 plugin encrypted. Of a
// value it reads the prefix and the key id, and decrypts nothing.
package etcd

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"net/url"
	"os"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/latticekeep/latticekeep/internal/durable"
)

const (
	pageSize    = 64 // objects of a page, each of which may have 1.5 MiB
	pageTimeout = 30 * time.Second
)

// prefix begins the value of each object that kube-apiserver encrypts with a KMS v2 plugin. The name
// that the EncryptionConfiguration gives to the plugin follows, and a colon.
var prefix = []byte("k8s:enc:kms:v2:")

// Config says how to be admitted to etcd. The zero value is for etcd without client certificates.
type Config struct {
	CA               string // file with the certificates of etcd's authority; default those of the system
	Certificate, Key string // files of the client certificate
}

// Use is how many objects name a key id.
type Use struct {
	Objects uint64
	Example string // key of one of them in etcd
}

// KeyIDs reads all objects of the etcd clusters of which each URL names a member, and returns the key
// ids that they name. Objects may change meanwhile. An object whose key id cannot be read is an error.
func KeyIDs(ctx context.Context, c Config, urls []string) (map[string]Use, error) {
	found := map[string]Use{}
	for _, text := range urls {
		if err := c.count(ctx, text, found); err != nil {
			return nil, fmt.Errorf("reading etcd at %s: %w", text, err)
		}
	}
	return found, nil
}

func (c Config) count(ctx context.Context, text string, found map[string]Use) error {
	connection, err := c.dial(text)
	if err != nil {
		return err
	}
	defer connection.Close()
	kv := etcdserverpb.NewKVClient(connection)
	for from := []byte{0}; from != nil; {
		if from, err = page(ctx, kv, from, found); err != nil {
			return err
		}
	}
	return nil
}

// page counts the objects of a page in found, and returns where the next page begins; nil: nowhere.
func page(ctx context.Context, kv etcdserverpb.KVClient, from []byte, found map[string]Use) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, pageTimeout)
	defer cancel()
	answer, err := kv.Range(ctx, &etcdserverpb.RangeRequest{Key: from, RangeEnd: []byte{0}, Limit: pageSize})
	if err != nil {
		return nil, err
	}
	for _, object := range answer.GetKvs() {
		id, err := keyID(object.GetValue())
		if err != nil {
			return nil, fmt.Errorf("the key id of %q cannot be read, so the API server cannot read the object either (delete it from etcd): %w", object.GetKey(), err)
		}
		if id != "" {
			use := found[id]
			if use.Objects++; use.Objects == 1 {
				use.Example = string(object.GetKey())
			}
			found[id] = use
		}
		from = append(bytes.Clone(object.GetKey()), 0)
	}
	if !answer.GetMore() {
		return nil, nil
	}
	if len(answer.GetKvs()) == 0 {
		return nil, errors.New("it says that there are more objects and sends none")
	}
	return from, nil
}

// keyID returns the key id that the value of an object names; "" for one that no KMS v2 plugin
// encrypted. What follows the prefix is the protobuf message EncryptedObject of kube-apiserver
// (k8s.io/apiserver/pkg/storage/value/encrypt/envelope/kmsv2/v2), whose field 2 is the key id.
func keyID(value []byte) (string, error) {
	rest, ok := bytes.CutPrefix(value, prefix)
	if !ok {
		return "", nil
	}
	_, message, ok := bytes.Cut(rest, []byte(":"))
	if !ok {
		return "", errors.New("the name of its plugin does not end")
	}
	id := ""
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeField(message)
		if n < 0 {
			return "", protowire.ParseError(n)
		}
		if _, _, tag := protowire.ConsumeTag(message); number == 2 && kind == protowire.BytesType {
			text, _ := protowire.ConsumeBytes(message[tag:])
			id = string(text)
		}
		message = message[n:]
	}
	if id == "" {
		return "", errors.New("it has none")
	}
	return id, nil
}

func (c Config) dial(text string) (*grpc.ClientConn, error) {
	u, err := url.Parse(text)
	if err != nil || u.Hostname() == "" || u.Port() == "" || u.User != nil || u.Path != "" && u.Path != "/" || u.Scheme != "https" && u.Scheme != "http" {
		return nil, fmt.Errorf("%q is no URL of etcd: give https://HOST:PORT", text)
	}
	transport := insecure.NewCredentials()
	if u.Scheme == "https" {
		config, err := c.tls()
		if err != nil {
			return nil, err
		}
		transport = credentials.NewTLS(config)
	}
	return grpc.NewClient("passthrough:///"+u.Host, grpc.WithTransportCredentials(transport), grpc.WithNoProxy(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(math.MaxInt32)))
}

func (c Config) tls() (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CA != "" {
		pem, err := os.ReadFile(c.CA)
		if err != nil {
			return nil, durable.ExplainRefusal(c.CA, err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%s has no certificate in PEM", c.CA)
		}
	}
	if c.Certificate != "" || c.Key != "" {
		pair, err := tls.LoadX509KeyPair(c.Certificate, c.Key)
		if err != nil {
			return nil, fmt.Errorf("reading the client certificate: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}
