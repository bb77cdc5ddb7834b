// Package csi is a provider for the Secrets Store CSI driver: pods get files of credentials without a Secret.
//
// The provider has no right of its own, in the cluster or in the vault. The driver hands it the token of the
// pod's ServiceAccount, with which it reads over REST. It stores nothing: the driver writes the files into a
// tmpfs of the pod.
package csi

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"sigs.k8s.io/secrets-store-csi-driver/provider/v1alpha1"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/internal/delivery"
	"github.com/latticekeep/latticekeep/internal/fair"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/secret"
	"github.com/latticekeep/latticekeep/internal/socket"
)

const (
	maxRequest     = 512 << 10 // bytes; a list of files has at most 64 KiB
	maxAnswer      = 4 << 20   // bytes; what gRPC allows a client by itself
	maxStreams     = 32        // calls of a connection
	maxMounts      = 4         // carried out at the same time, so that large volumes fit into the memory of the pod
	maxValues      = 4 << 20   // bytes of the credentials of a volume
	connectTimeout = 5 * time.Second
	mountTimeout   = 45 * time.Second // less than the two minutes of the kubelet, which tries again
	endTimeout     = 5 * time.Second

	// defaultMode lets containers read that do not run as root: the driver gives all files to root. Only the
	// containers that mount the volume see them.
	defaultMode = fs.FileMode(0o444)
)

// Config configures [Serve].
type Config struct {
	Server  *delivery.Server
	Socket  string // path
	Version string // version of the program
	Logger  *slog.Logger
}

// Serve answers the driver until ctx ends.
func Serve(ctx context.Context, c Config) (err error) {
	s, err := socket.Claim(c.Socket)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Release()) }()
	l, err := s.Listen()
	if err != nil {
		return err
	}
	server := grpc.NewServer(grpc.MaxRecvMsgSize(maxRequest), grpc.MaxSendMsgSize(maxAnswer), grpc.MaxConcurrentStreams(maxStreams),
		grpc.ConnectionTimeout(connectTimeout), grpc.ForceServerCodecV2(zeroing{encoding.GetCodecV2(proto.Name)}))
	v1alpha1.RegisterCSIDriverProviderServer(server, newProvider(c))
	c.Logger.Info("serving", "socket", s.Path)
	ended := make(chan error, 1) // capacity 1: nobody may receive
	go func() { ended <- server.Serve(l) }()
	select {
	case err := <-ended:
		return fmt.Errorf("serving: %w", err)
	case <-ctx.Done():
	}
	stop := time.AfterFunc(endTimeout, server.Stop)
	defer stop.Stop()
	server.GracefulStop()
	if err := <-ended; !errors.Is(err, grpc.ErrServerStopped) {
		return err
	}
	return nil
}

type provider struct {
	v1alpha1.UnimplementedCSIDriverProviderServer
	c     Config
	turns *fair.Pool[string] // keyed by namespace
}

// newProvider returns a provider. No turn is taken back: each mount ends by itself.
func newProvider(c Config) provider {
	return provider{c: c, turns: fair.NewPool[string](maxMounts, mountTimeout)}
}

// Version implements the interface of the driver.
func (p provider) Version(context.Context, *v1alpha1.VersionRequest) (*v1alpha1.VersionResponse, error) {
	return &v1alpha1.VersionResponse{Version: "v1alpha1", RuntimeName: "latticekeep", RuntimeVersion: p.c.Version}, nil
}

// Mount implements the interface of the driver. It is called for each volume, and again and again where the
// driver rotates. While nothing changed since the driver was answered last, it answers without files, and
// the driver leaves those that are there.
func (p provider) Mount(ctx context.Context, r *v1alpha1.MountRequest) (*v1alpha1.MountResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, mountTimeout)
	defer cancel()
	m, err := parse(r)
	var answer *v1alpha1.MountResponse
	if err == nil {
		answer, err = p.inTurn(ctx, m)
	}
	if err != nil {
		p.c.Logger.Warn("not mounted", "namespace", m.namespace, "pod", m.pod, "error", fault.Message(err))
		return nil, status.Error(codeOf(err), fault.Message(err))
	}
	return answer, nil
}

// inTurn carries out a request when there are few others. The namespace with the fewest of them comes next, so that
// none keeps the others waiting.
func (p provider) inTurn(ctx context.Context, m mount) (*v1alpha1.MountResponse, error) {
	turn, err := p.turns.Acquire(ctx, m.namespace, 1, func() {})
	if err != nil {
		return nil, fault.New(fault.Unavailable, "too many volumes are mounted on this node at the same time")
	}
	defer turn.Release()
	if m.plan, err = delivery.Parse(m.files, defaultMode); err != nil {
		return nil, fault.Wrap(fault.Invalid, "spec.parameters of the SecretProviderClass: "+fault.Message(err), err)
	}
	answer, err := m.mount(ctx, p.c.Server)
	if len(answer.GetFiles()) > 0 { // and not one of many polls
		p.c.Logger.Info("mounted", "namespace", m.namespace, "pod", m.pod, "credentials", m.plan.Credentials(), "files", len(answer.GetFiles()))
	}
	return answer, err
}

// zeroing overwrites the values of an answer once it is encoded. What gRPC sends is a copy, which nothing here can reach.
type zeroing struct{ encoding.CodecV2 }

// Marshal implements the interface of gRPC.
func (z zeroing) Marshal(message any) (mem.BufferSlice, error) {
	encoded, err := z.CodecV2.Marshal(message)
	if answer, is := message.(*v1alpha1.MountResponse); is {
		for _, f := range answer.GetFiles() {
			clear(f.GetContents())
		}
	}
	return encoded, err
}

func codeOf(err error) codes.Code {
	switch fault.Of(err) {
	case fault.Invalid:
		return codes.InvalidArgument
	case fault.Forbidden:
		return codes.PermissionDenied
	case fault.Unauthenticated:
		return codes.Unauthenticated
	}
	return codes.Unavailable
}

// mount is a parsed MountRequest.
type mount struct {
	namespace, pod string
	token          string
	files          string            // text of the plan
	digest         string            // SHA-256 of the text, shortened
	plan           delivery.Plan     // once it has its turn
	had            map[string]string // versions that the driver was answered last, by id
}

// A request mixes the attributes of the driver, the volume's attribute with the class's name, and the parameters of
// the SecretProviderClass.
const (
	ofDriver  = "csi.storage.k8s.io/" // prefix
	className = "secretProviderClass"
	parameter = "files"
	planID    = "files" // id under which the driver keeps the digest of the plan
)

// parse reads a request. What it could read of it is valid after an error, too. Error: fault.Invalid.
func parse(r *v1alpha1.MountRequest) (m mount, err error) {
	var given map[string]string
	if err := json.Unmarshal([]byte(r.GetAttributes()), &given); err != nil {
		return m, fault.Wrap(fault.Invalid, "the driver's attributes are not JSON", err)
	}
	m.namespace, m.pod = given[ofDriver+"pod.namespace"], given[ofDriver+"pod.name"]
	for _, name := range slices.Sorted(maps.Keys(given)) {
		if name != parameter && name != className && !strings.HasPrefix(name, ofDriver) {
			return m, fault.New(fault.Invalid, fmt.Sprintf("spec.parameters.%s of the SecretProviderClass is not known: there is only %s", name, parameter))
		}
	}
	m.files = given[parameter]
	digest := sha256.Sum256([]byte(m.files))
	m.digest = hex.EncodeToString(digest[:8])
	var tokens map[string]struct {
		Token string `json:"token"`
	}
	_ = json.Unmarshal([]byte(given[ofDriver+"serviceAccount.tokens"]), &tokens)
	if m.token = tokens[delivery.Audience].Token; m.token == "" {
		return m, fault.New(fault.Invalid, "the driver sent no token of the pod for the audience "+delivery.Audience+
			": install it with tokenRequests in its CSIDriver, as with helm's --set 'tokenRequests[0].audience="+delivery.Audience+"'")
	}
	m.had = make(map[string]string)
	for _, v := range r.GetCurrentObjectVersion() {
		m.had[v.GetId()] = v.GetVersion()
	}
	return m, nil
}

// mount reads the credentials and makes the answer. Without a change since the driver was answered last, it
// reads no value.
func (m mount) mount(ctx context.Context, server *delivery.Server) (*v1alpha1.MountResponse, error) {
	versions := map[string]string{planID: m.digest}
	values, size := make(map[string]map[string]secret.Bytes), 0
	read := func(name string, options ...client.CallOption) error {
		c, err := server.Read(ctx, m.token, name, options...)
		if err != nil {
			return err
		}
		values[name], versions[idOf(name)] = c.Values, versionOf(c)
		for _, value := range c.Values {
			size += len(value)
		}
		if size > maxValues {
			return fault.New(fault.Invalid, fmt.Sprintf("the credentials of the volume have more than %d bytes: divide them among several volumes", maxValues))
		}
		return nil
	}
	defer func() {
		for _, v := range values {
			secret.ZeroAll(v)
		}
	}()
	var unchanged []string
	for _, name := range m.plan.Credentials() {
		err := read(name, client.OtherThan(m.tagOf(name)))
		if errors.Is(err, client.ErrNotModified) {
			unchanged = append(unchanged, name)
		} else if err != nil {
			return nil, err
		}
	}
	nothingElse := len(m.had) == len(unchanged)+1 // the credentials, and the plan's digest
	if len(values) == 0 && nothingElse {
		return answerOf(m.had, nil), nil
	}
	for _, name := range unchanged { // the answer has all files or none
		if err := read(name); err != nil {
			return nil, err
		}
	}
	files, err := m.plan.Render(values)
	if err != nil {
		return nil, err
	}
	return answerOf(versions, files), nil
}

// tagOf returns the entity tag of the version that the driver has of a credential, or "" when it has none that
// this plan made.
func (m mount) tagOf(credential string) string {
	if m.had[planID] != m.digest {
		return ""
	}
	_, tag, _ := strings.Cut(m.had[idOf(credential)], versionEnd)
	return tag
}

// The driver keeps ids and versions in an object of the cluster. The version is that of the vault and the entity
// tag, which also changes when another credential gets the name.
const versionEnd = " "

func versionOf(c delivery.Credential) string { return fmt.Sprint(c.Version, versionEnd, c.Tag) }

func idOf(credential string) string { return "credential/" + credential }

func answerOf(versions map[string]string, files []delivery.File) *v1alpha1.MountResponse {
	answer := &v1alpha1.MountResponse{}
	for _, id := range slices.Sorted(maps.Keys(versions)) {
		answer.ObjectVersion = append(answer.ObjectVersion, &v1alpha1.ObjectVersion{Id: id, Version: versions[id]})
	}
	for _, f := range files {
		answer.Files = append(answer.Files, &v1alpha1.File{Path: f.Path, Mode: int32(f.Mode), Contents: f.Content}) //nolint:gosec // nine bits
	}
	return answer
}
