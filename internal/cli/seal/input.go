package seal

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"

	"github.com/latticekeep/latticekeep/api/v1alpha1"
	"github.com/latticekeep/latticekeep/api/v1beta1"
)

// maxInput is the maximum size in bytes of a file or of standard input.
const maxInput = 4 << 20

// parseSecrets parses v1 Secrets. Its errors quote only field names.
func parseSecrets(b []byte) ([]*corev1.Secret, error) {
	docs, err := documents(b)
	if err != nil {
		return nil, err
	}
	if len(docs) == 0 {
		return nil, errors.New("the manifest is empty: give a v1 Secret")
	}
	all := make([]*corev1.Secret, len(docs))
	for i, doc := range docs {
		if all[i], err = parseSecret(doc); err != nil && len(docs) > 1 {
			err = fmt.Errorf("document %d: %w", i+1, err)
		}
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

func parseSecret(doc []byte) (*corev1.Secret, error) {
	obj, _, err := decodeObject(doc, corev1.AddToScheme)
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

// readInput reads a file, or stdin for "-".
func readInput(path string, stdin io.Reader) ([]byte, error) {
	name, r := path, stdin
	if path == "-" && stdin != nil {
		name = "standard input"
	} else {
		f, err := os.Open(path)
		if err != nil {
			return nil, err // the error names the path
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

// documents splits YAML as kubectl does and skips empty documents.
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

// blank reports whether doc has only white space and comments.
func blank(doc []byte) bool {
	for line := range bytes.Lines(doc) {
		line = bytes.TrimSpace(line)
		if len(line) > 0 && line[0] != '#' && !bytes.Equal(line, []byte("---")) {
			return false
		}
	}
	return true
}

// decodeObject decodes one YAML or JSON document of a kind that register adds. It is as strict as
// the API server: unknown and duplicate fields are errors. For other kinds
// runtime.IsNotRegisteredError reports true of its error.
func decodeObject(doc []byte, register func(*runtime.Scheme) error) (runtime.Object, *schema.GroupVersionKind, error) {
	scheme := runtime.NewScheme()
	if err := register(scheme); err != nil {
		return nil, nil, err
	}
	s := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme, json.SerializerOptions{Yaml: true, Strict: true})
	return s.Decode(doc, nil, nil)
}

// yamlLine matches the line number in an error of a YAML parser.
var yamlLine = regexp.MustCompile(`line [0-9]+`)

// decodeSealedCredential decodes an object of either version. It returns nil for an object of
// another kind. Its errors quote nothing from other objects, which may be plain Secrets.
func decodeSealedCredential(doc []byte) (*v1beta1.SealedCredential, error) {
	obj, kind, err := decodeObject(doc, func(s *runtime.Scheme) error { return errors.Join(v1beta1.AddToScheme(s), v1alpha1.AddToScheme(s)) })
	switch {
	case runtime.IsMissingKind(err), runtime.IsMissingVersion(err):
		return nil, errors.New("has no apiVersion and kind") // the cause would quote the document
	case runtime.IsNotRegisteredError(err) && kind != nil && kind.Group != v1beta1.GroupVersion.Group:
		return nil, nil
	case runtime.IsNotRegisteredError(err):
		return nil, fmt.Errorf("is not of a kind that this program knows: it reads %s %s", v1beta1.GroupVersion, v1beta1.KindSealedCredential)
	case err != nil && kind == nil:
		// The document may be anything because even its kind is unreadable. The parser's message
		// would quote from it, so only the line number is kept.
		where := ""
		if line := yamlLine.FindString(err.Error()); line != "" {
			where = " (" + line + ")"
		}
		return nil, errors.New("is not well-formed YAML or JSON" + where)
	case err != nil:
		return nil, err
	}
	switch sc := obj.(type) {
	case *v1beta1.SealedCredential:
		return sc, nil
	case *v1alpha1.SealedCredential:
		return sc.Current(), nil
	}
	return nil, errors.New("is a list: give the objects themselves")
}
