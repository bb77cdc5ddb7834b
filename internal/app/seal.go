package app

import (
	"bufio"
	"bytes"
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
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	corev1client "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/internal/sealing"
	"github.com/latticekeep/latticekeep/internal/secret"
)

const (
	sealingKeyPath      = "/api/v2/sealing-key"     // of the REST interface
	sealingKeyConfigMap = "latticekeep-sealing-key" // in the operator's namespace
	sealingKeyDataKey   = "sealing-key.json"        // of the ConfigMap
	identityFile        = ".latticekeep.yaml"

	fetchTimeout = 10 * time.Second
)

// maxInput is the size in bytes of the largest file or standard input that is read.
const maxInput = 4 << 20

// identityEnv is the environment variable with the fingerprint of the pinned identity.
const identityEnv = "LATTICEKEEP_IDENTITY"

// sealOptions are the flags of latticekeep seal.
type sealOptions struct {
	namespace, name, credentialType, scope string
	ttlDays                                int32

	literals, files []string // key=value; key=path or path
	manifest        string   // path of a Secret manifest, - for standard input
	beside          string   // file of SealedCredentials that the values are for; the pinned identity is looked for beside it

	keyFile, url, kubeconfig, keyNamespace string
	fromCluster                            bool
	identity                               string
}

func newSealCommand() *cobra.Command {
	var o sealOptions
	cmd := &cobra.Command{
		Use:   "seal",
		Short: "Seal values into a SealedCredential manifest",
		Long: `Seal writes a SealedCredential manifest to standard output. Its values can be opened only by the vault, and by
default only in the object of this namespace, name and credential type; the manifest is safe to keep in git.

Values come from files (--from-file), a v1 Secret manifest (-f) or literals. A literal can be seen in the shell's
history and in the list of processes: prefer a file, or standard input (--from-file KEY=- or -f -).

With --merge-into the values are put into a manifest that there is already, in the place of those with the same data keys
or beside the others, which need not be known. Scope, type, namespace and name are the manifest's, and it has to be sealed
for the same key: latticekeep reseal moves it to the newest one. Comments, order and everything else stay as they are.

The sealing key comes from a key file, which is trusted as it is, or is fetched from the server or the cluster and then
has to be signed by the pinned identity: that of --identity, of the environment variable ` + identityEnv + `, or of a
file ` + identityFile + ` ("identity: FINGERPRINT") in the folder of -f or --merge-into or the current folder.`,
		Example: `  latticekeep seal --name db --namespace shop --type database --from-file password=./password --key sealing-key.json
  latticekeep seal -f secret.yaml --type database --url https://vault.example.com > sealed.yaml
  latticekeep seal --merge-into sealed.yaml --from-file password=./password --url https://vault.example.com`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := refuseEmpty(cmd, "identity", "merge-into"); err != nil {
				return err
			}
			if o.beside != "" {
				return o.merge(cmd.Context(), cmd.Flags().Changed("scope"), cmd.InOrStdin(), cmd.OutOrStdout())
			}
			if o.credentialType == "" {
				return errors.New(`required flag(s) "type" not set`)
			}
			return o.run(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.name, "name", "", "name of the object (default: the Secret manifest's)")
	f.StringVar(&o.namespace, "namespace", "", "namespace of the object (default: the Secret manifest's)")
	f.StringVar(&o.credentialType, "type", "", "credential type, such as database")
	f.Int32Var(&o.ttlDays, "ttl-days", 0, "days the vault entry lives after each rotation, 1 to 3650 (default 90)")
	f.StringVar(&o.scope, "scope", string(v1alpha1.ScopeStrict), "where the values open: Strict (this object), Namespace or Cluster")
	f.StringArrayVar(&o.literals, "from-literal", nil, "`KEY=VALUE`; visible in history and process lists, prefer a file")
	f.StringArrayVar(&o.files, "from-file", nil, "`[KEY=]PATH`; the key is the file's name by default, and KEY=- reads standard input")
	f.StringVarP(&o.manifest, "filename", "f", "", "v1 Secret manifest, - for standard input")
	f.StringVar(&o.beside, "merge-into", "", "file with the manifest to put the values into, instead of writing one")
	o.keyFlags(cmd)
	cmd.MarkFlagsOneRequired("from-literal", "from-file", "filename")
	return cmd
}

// keyFlags defines the flags that say where the sealing key comes from.
func (o *sealOptions) keyFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.keyFile, "key", "", "file with the sealing key document")
	f.StringVar(&o.url, "url", "", "server to fetch the sealing key document from")
	f.BoolVar(&o.fromCluster, "from-cluster", false, "read the sealing key document from the cluster")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig for --from-cluster (default: KUBECONFIG, then ~/.kube/config)")
	f.StringVar(&o.keyNamespace, "key-namespace", "latticekeep-system", "namespace of the operator for --from-cluster")
	f.StringVar(&o.identity, "identity", "", "fingerprint of the identity that must have signed the sealing key")
	cmd.MarkFlagsOneRequired("key", "url", "from-cluster")
	cmd.MarkFlagsMutuallyExclusive("key", "url", "from-cluster")
}

func (o *sealOptions) run(ctx context.Context, stdin io.Reader, stdout io.Writer) error {
	r, err := o.request(stdin)
	if err != nil {
		return err
	}
	defer func() {
		for _, v := range r.Values {
			v.Zero()
		}
	}()
	doc, err := o.document(ctx)
	if err != nil {
		return err
	}
	obj, err := sealing.Seal(doc.Key(), r, time.Now())
	if err != nil {
		return err
	}
	out, err := yaml.Marshal(obj)
	if err != nil {
		return fmt.Errorf("encoding manifest: %w", err)
	}
	_, err = stdout.Write(out)
	return err
}

// request gathers what to seal. Flags win over the Secret manifest; the same data key twice is an error.
func (o *sealOptions) request(stdin io.Reader) (sealing.Request, error) {
	r := sealing.Request{
		Namespace:      o.namespace,
		Name:           o.name,
		CredentialType: o.credentialType,
		TTLDays:        o.ttlDays,
		Scope:          v1alpha1.Scope(o.scope),
		Values:         make(map[string]secret.Bytes),
	}
	add := func(key string, value []byte) error {
		if _, twice := r.Values[key]; twice {
			return fmt.Errorf("data key %q is given twice", key)
		}
		r.Values[key] = value
		return nil
	}

	stdinUsed := false
	read := func(path string) ([]byte, error) {
		if path == "-" {
			if stdinUsed {
				return nil, errors.New("standard input can be read only once: use files for the other values")
			}
			stdinUsed = true
		}
		return readInput(path, stdin)
	}
	if o.manifest != "" {
		b, err := read(o.manifest)
		if err != nil {
			return r, err
		}
		s, err := parseSecret(b)
		if err != nil {
			return r, err
		}
		if r.Name == "" {
			r.Name = s.Name
		}
		if r.Namespace == "" {
			r.Namespace = s.Namespace
		}
		for k, v := range s.Data {
			r.Values[k] = v
		}
		for k, v := range s.StringData { // wins over data, as in the API server
			r.Values[k] = secret.Bytes(v)
		}
	}
	for _, spec := range o.files {
		key, path, ok := strings.Cut(spec, "=")
		if !ok {
			key, path = filepath.Base(spec), spec
		}
		if !ok && path == "-" {
			return r, errors.New("--from-file - needs a data key: --from-file KEY=-")
		}
		value, err := read(path)
		if err != nil {
			return r, err
		}
		if err := add(key, value); err != nil {
			return r, err
		}
	}
	for _, spec := range o.literals {
		key, value, ok := strings.Cut(spec, "=")
		if !ok {
			return r, errors.New("--from-literal wants KEY=VALUE") // not quoted: it may be the value
		}
		if err := add(key, []byte(value)); err != nil {
			return r, err
		}
	}
	return r, nil
}

// parseSecret reads one v1 Secret. Its errors quote nothing of it but field names.
func parseSecret(b []byte) (*corev1.Secret, error) {
	docs, err := documents(b)
	if err != nil {
		return nil, err
	}
	if len(docs) != 1 {
		return nil, fmt.Errorf("the manifest has %d documents: give one Secret at a time", len(docs))
	}
	obj, _, err := decodeObject(docs[0], corev1.AddToScheme)
	switch {
	case runtime.IsNotRegisteredError(err), runtime.IsMissingKind(err), runtime.IsMissingVersion(err):
		return nil, errors.New("the manifest is not a v1 Secret: give one Secret, not a list or another kind")
	case runtime.IsStrictDecodingError(err):
		return nil, fmt.Errorf("decoding Secret: %w", err)
	case err != nil: // the cause may quote a value
		return nil, errors.New("the manifest is not a valid v1 Secret: data holds base64 and stringData holds text (kubectl apply --dry-run=client shows where it is wrong)")
	}
	s, ok := obj.(*corev1.Secret)
	if !ok {
		return nil, errors.New("the manifest is not a v1 Secret: give one Secret, not a list or another kind")
	}
	switch s.Type {
	case corev1.SecretTypeServiceAccountToken:
		return nil, errors.New("a ServiceAccount token is not sealed: its cluster issues and ends it; mount a projected token instead")
	case corev1.SecretTypeBootstrapToken:
		return nil, errors.New("a bootstrap token is not sealed: it lets nodes join one cluster; make it there with kubeadm")
	}
	return s, nil
}

// document returns the sealing key document that the flags name, trusted.
func (o *sealOptions) document(ctx context.Context) (sealing.Document, error) {
	if o.keyFile != "" {
		doc, err := readDocument(o.keyFile)
		if err == nil && o.identity != "" {
			err = doc.CheckIdentity(o.identity)
		}
		return doc, err
	}

	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	var b []byte
	var err error
	if o.fromCluster {
		b, err = readConfigMap(ctx, o.kubeconfig, o.keyNamespace)
	} else {
		b, err = fetchDocument(ctx, o.url)
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
			"\"identity: %s\" beside the manifests", doc.Identity(), identityEnv, identityFile, doc.Identity())
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

// pinnedIdentity returns the fingerprint of the flag, else the environment, else the nearest file; "" when there is none.
func (o *sealOptions) pinnedIdentity() (string, error) {
	if o.identity != "" {
		return o.identity, nil
	}
	if pin := os.Getenv(identityEnv); pin != "" {
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

// fetchDocument gets the document from a server, given its base URL or the document's own. What makes it safe over any
// connection is the pinned identity, not the transport.
func fetchDocument(ctx context.Context, server string) ([]byte, error) {
	u, err := url.Parse(server)
	if err != nil || u.Host == "" || (u.Scheme != "https" && u.Scheme != "http") {
		return nil, errors.New("--url wants the server's URL, such as https://vault.example.com")
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
		return nil, fmt.Errorf("fetching sealing key: %s answered %s: check --url", u.Redacted(), resp.Status)
	}
	// One byte more than allowed lets the parser see that it is too much.
	b, err := io.ReadAll(io.LimitReader(resp.Body, sealing.MaxDocumentBytes+1))
	if err != nil {
		return nil, fmt.Errorf("fetching sealing key: %w", err)
	}
	return b, nil
}

// readConfigMap gets the document that the operator publishes in its namespace.
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

// readInput reads a file, or stdin for "-".
func readInput(path string, stdin io.Reader) ([]byte, error) {
	name, r := path, stdin
	if path == "-" && stdin != nil {
		name = "standard input"
	} else {
		f, err := os.Open(path)
		if err != nil {
			return nil, err // names the path itself
		}
		defer func() { _ = f.Close() }()
		r = f
	}
	b, err := io.ReadAll(io.LimitReader(r, maxInput+1))
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", name, err)
	}
	if len(b) > maxInput {
		return nil, fmt.Errorf("%s is larger than %d MiB", name, maxInput>>20)
	}
	return b, nil
}

// documents splits YAML as kubectl does, leaving out documents that hold nothing.
func documents(b []byte) ([][]byte, error) {
	var docs [][]byte
	r := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(b)))
	for {
		doc, err := r.Read()
		if errors.Is(err, io.EOF) {
			return docs, nil
		}
		if err != nil {
			return nil, errors.New("the input is not YAML: text follows a document separator")
		}
		if !blank(doc) {
			docs = append(docs, doc)
		}
	}
}

// blank reports whether doc has nothing but white space and comments.
func blank(doc []byte) bool {
	for line := range bytes.Lines(doc) {
		line = bytes.TrimSpace(line)
		if len(line) > 0 && line[0] != '#' && !bytes.Equal(line, []byte("---")) {
			return false
		}
	}
	return true
}

// decodeObject decodes one YAML or JSON document of a kind that register knows, as strictly as the API server: unknown
// and duplicate fields are errors. runtime.IsNotRegisteredError tells other kinds.
func decodeObject(doc []byte, register func(*runtime.Scheme) error) (runtime.Object, *schema.GroupVersionKind, error) {
	scheme := runtime.NewScheme()
	if err := register(scheme); err != nil {
		return nil, nil, err
	}
	s := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme, json.SerializerOptions{Yaml: true, Strict: true})
	return s.Decode(doc, nil, nil)
}
