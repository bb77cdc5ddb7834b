package seal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/sealing"
)

const (
	sealingKeyPath      = "/api/v2/sealing-key"     // path in the REST API
	sealingKeyConfigMap = "latticekeep-sealing-key" // name in the operator's namespace
	sealingKeyDataKey   = "sealing-key.json"        // key in the ConfigMap
	identityFile        = ".latticekeep.yaml"

	fetchTimeout = 10 * time.Second
)

// keyFlags defines the flags that name the source of the sealing key.
func (o *sealOptions) keyFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.keyFile, "key", "", "file with the sealing key document")
	o.server.RegisterAddress(cmd, f, "server to fetch the sealing key document from")
	f.BoolVar(&o.fromCluster, "from-cluster", false, "read the sealing key document from the cluster")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig for --from-cluster (default: KUBECONFIG, then ~/.kube/config)")
	f.StringVar(&o.keyNamespace, "key-namespace", "latticekeep-system", "namespace of the operator for --from-cluster")
	f.StringVar(&o.identity, "identity", "", "fingerprint of the identity that must have signed the sealing key")
	cmd.MarkFlagsMutuallyExclusive("key", "url", "profile", "from-cluster")
}

// document returns the sealing-key document that the flags name, after checking that it can be
// trusted.
func (o *sealOptions) document(ctx context.Context) (sealing.Document, error) {
	if o.keyFile != "" {
		doc, err := readDocument(o.keyFile)
		if err == nil && o.identity != "" {
			err = doc.CheckIdentity(o.identity)
		}
		return doc, err
	}

	if !o.fromCluster {
		if err := o.server.Locate(); err != nil {
			return sealing.Document{}, err
		}
	}
	if o.server.URL == "" && !o.fromCluster {
		return sealing.Document{}, command.UsageError("one of --key, --url and --from-cluster is needed, or " + command.URLVariable + ", or latticekeep login")
	}
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	var b []byte
	var err error
	if o.fromCluster {
		b, err = readConfigMap(ctx, o.kubeconfig, o.keyNamespace)
	} else {
		b, err = fetchDocument(ctx, o.server.URL)
	}
	if err != nil {
		return sealing.Document{}, err
	}
	doc, err := sealing.ParseDocument(b)
	if err != nil {
		return sealing.Document{}, err
	}
	pin, err := o.pinnedIdentity()
	if err != nil {
		return sealing.Document{}, err
	}
	if pin == "" {
		return sealing.Document{}, fmt.Errorf("the sealing key is signed by identity %s, and no identity is pinned: confirm this "+
			"fingerprint with the operator over another channel, then give --identity, set %s, or commit a file %s with the line "+
			"\"identity: %s\" beside the manifests", doc.Identity(), config.IdentityVariable, identityFile, doc.Identity())
	}
	return doc, doc.CheckIdentity(pin)
}

// readDocument reads a key file.
func readDocument(path string) (sealing.Document, error) {
	b, err := readInput(path, nil)
	if err != nil {
		return sealing.Document{}, err
	}
	return sealing.ParseDocument(b)
}

// pinnedIdentity returns the fingerprint from the flag, else from the environment, else from the
// nearest file. It returns "" without any.
func (o *sealOptions) pinnedIdentity() (string, error) {
	if o.identity != "" {
		return o.identity, nil
	}
	if pin := os.Getenv(config.IdentityVariable); pin != "" {
		return pin, nil
	}
	var folders []string
	for _, file := range []string{o.beside, o.manifest} {
		if file != "" && file != "-" {
			folders = append(folders, filepath.Dir(file))
		}
	}
	folders = append(folders, ".")
	for _, folder := range folders {
		path := filepath.Join(folder, identityFile)
		b, err := readInput(path, nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", err
		}
		var pinned struct {
			Identity string `json:"identity"`
		}
		if err := yaml.UnmarshalStrict(b, &pinned); err != nil {
			return "", fmt.Errorf("decoding %s: %w", path, err)
		}
		if pinned.Identity == "" {
			return "", fmt.Errorf("%s pins nothing: it needs the line \"identity: FINGERPRINT\"", path)
		}
		return pinned.Identity, nil
	}
	return "", nil
}

// fetchDocument downloads the sealing-key document from a server. server is the base URL or that of
// the document. The pinned identity makes the document safe over any connection, so the transport
// does not have to.
func fetchDocument(ctx context.Context, server string) ([]byte, error) {
	u, err := url.Parse(server)
	if err != nil || u.Host == "" || (u.Scheme != "https" && u.Scheme != "http") {
		return nil, command.UsageError("--url wants the server's URL, such as https://vault.example.com")
	}
	if !strings.HasSuffix(u.Path, sealingKeyPath) {
		u = u.JoinPath(sealingKeyPath)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, fmt.Errorf("fetching sealing key: %w", err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("fetching sealing key: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		err := fmt.Errorf("fetching sealing key: %s answered %s: check --url", u.Redacted(), resp.Status)
		return nil, &command.StatusError{Status: command.StatusOfHTTP(resp.StatusCode), Err: err}
	}
	// One byte more than allowed lets the parser detect that the document is too long.
	b, err := io.ReadAll(io.LimitReader(resp.Body, sealing.MaxDocumentBytes+1))
	if err != nil {
		return nil, fmt.Errorf("fetching sealing key: %w", err)
	}
	return b, nil
}

// readConfigMap reads the document that the operator publishes in its namespace.
func readConfigMap(ctx context.Context, kubeconfig, namespace string) ([]byte, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, nil).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("loading kubeconfig: %w", err)
	}
	client, err := corev1client.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("connecting to the cluster: %w", err)
	}
	cm, err := client.ConfigMaps(namespace).Get(ctx, sealingKeyConfigMap, metav1.GetOptions{})
	if err != nil {
		return nil, fmt.Errorf("reading ConfigMap %s in namespace %s (--key-namespace): %w", sealingKeyConfigMap, namespace, err)
	}
	doc, ok := cm.Data[sealingKeyDataKey]
	if !ok {
		return nil, fmt.Errorf("ConfigMap %s has no key %s: is the operator running?", sealingKeyConfigMap, sealingKeyDataKey)
	}
	return []byte(doc), nil
}

// sealOptions are the flags of latticekeep seal.
type sealOptions struct {
	namespace, name, credentialType, scope string
	ttlDays                                *int32

	literals, files []string // key=value; key=path or path
	manifest        string   // path of a Secret manifest; - for standard input
	beside          string   // file of SealedCredentials to merge into; the search for a pinned identity starts beside it

	noTarget bool

	keySource
}

// keySource says where the sealing key comes from, and which identity must have signed it.
type keySource struct {
	server                            command.Server
	keyFile, kubeconfig, keyNamespace string
	fromCluster                       bool
	identity                          string
}
