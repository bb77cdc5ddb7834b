package objects

import (
	"bytes"
	"cmp"
	"context"
	"crypto"
	"crypto/md5" //nolint:gosec // the service compares the sum with what arrived
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"io/fs"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/google"
)

// gcsBucket is a bucket of Google Cloud Storage. It uses the JSON interface:
// https://cloud.google.com/storage/docs/json_api
type gcsBucket struct {
	client  *http.Client
	base    string // scheme and host of the service
	signing string // scheme and host of the signing service
	bucket  string

	credentials *google.Credentials // nil: anonymous
	accessID    string              // account that signs URLs; "" for the account of the credentials
	privateKey  []byte              // key that signs URLs, in PEM; nil: Google signs
}

// maxMessage bounds an answer other than an object, in bytes.
const maxMessage = 1 << 20

// A call that the service asks to repeat is repeated after gcsPause, then after twice that pause,
// and so on, for gcsTries attempts in total.
const (
	gcsPause = 200 * time.Millisecond
	gcsTries = 5
)

// openGCS opens gs://bucket. The parameters are those of gocloud.dev/blob/gcsblob: anonymous;
// access_id, the service account that signs URLs, or "-" for anonymous; private_key_path, the PEM
// file of its key; universe_domain.
func openGCS(ctx context.Context, u *url.URL) (cloud, error) {
	query := u.Query()
	for name := range query {
		switch name {
		case "anonymous", "access_id", "private_key_path", "universe_domain":
		case "grpc", "zonal": // parameters of gcsblob that choose gRPC, which this package lacks
			if on, err := strconv.ParseBool(query.Get(name)); err != nil || on {
				return nil, fmt.Errorf("the parameter %s can only be false: Google Cloud Storage is called by REST", name)
			}
		default:
			return nil, fmt.Errorf("the parameter %s is unknown", name)
		}
	}
	anonymous, err := strconv.ParseBool(cmp.Or(query.Get("anonymous"), "false"))
	if err != nil {
		return nil, errors.New("the parameter anonymous must be true or false")
	}
	universe := cmp.Or(query.Get("universe_domain"), google.Universe)
	b := &gcsBucket{
		base: "https://storage." + universe, signing: "https://iamcredentials." + universe, bucket: u.Host, accessID: query.Get("access_id"),
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	transport.DisableCompression = true // the size of an object is the one in its header
	b.client = &http.Client{Transport: transport}
	if emulator := os.Getenv("STORAGE_EMULATOR_HOST"); emulator != "" {
		b.base = "http://" + strings.TrimPrefix(emulator, "http://")
		anonymous = true
	}
	if b.accessID == "-" {
		b.accessID, anonymous = "", true
	}
	if path := query.Get("private_key_path"); path != "" {
		if b.privateKey, err = os.ReadFile(path); err != nil {
			return nil, fmt.Errorf("reading private_key_path: %w", err)
		}
	}
	if anonymous {
		return b, nil
	}
	if b.credentials, err = google.Find(ctx, universe); err != nil {
		return nil, err
	}
	b.client = b.credentials.Client(transport)
	if key := b.credentials.PrivateKey(); key != nil && !query.Has("private_key_path") {
		own, err := b.credentials.Email(ctx)
		if err == nil && (b.accessID == "" || b.accessID == own) { // otherwise Google signs for access_id
			b.privateKey = key
		}
	}
	return b, nil
}

// gcsError is an answer that reports a failure.
type gcsError struct {
	code    int
	message string
}

func (e *gcsError) Error() string {
	return fmt.Sprintf("Google Cloud Storage answers %d: %s", e.code, e.message)
}

// object returns the path of an object.
func (b *gcsBucket) object(name string) string {
	return "/storage/v1/b/" + url.PathEscape(b.bucket) + "/o/" + url.PathEscape(name)
}

// call makes a request until it is answered or must not be repeated. Every call may be repeated,
// because it has the same effect again. It returns a successful answer, whose body the caller
// closes.
func (b *gcsBucket) call(ctx context.Context, method, address, contentType string, body []byte, header ...string) (*http.Response, error) {
	for try, pause := 1, gcsPause; ; try, pause = try+1, 2*pause {
		resp, again, err := b.request(ctx, method, address, contentType, body, header)
		if err == nil || !again || try == gcsTries {
			return resp, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

func (b *gcsBucket) request(ctx context.Context, method, address, contentType string, body []byte, header []string) (resp *http.Response, again bool, err error) {
	r, err := http.NewRequestWithContext(ctx, method, address, bytes.NewReader(body))
	if err != nil {
		return nil, false, err
	}
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	if resp, err = b.client.Do(r); err != nil {
		return nil, true, err
	}
	switch resp.StatusCode {
	case http.StatusPermanentRedirect, 499: // the answers to a part of an upload that is not the last, and to giving one up
		return resp, false, nil
	}
	if resp.StatusCode/100 == 2 {
		return resp, false, nil
	}
	defer resp.Body.Close()
	message, _ := io.ReadAll(io.LimitReader(resp.Body, maxMessage))
	var refusal struct {
		Error struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	if json.Unmarshal(message, &refusal) != nil { // an answer of another server, or to a request for the object itself
		refusal.Error.Message = string(message[:min(len(message), 200)])
	}
	e := &gcsError{resp.StatusCode, refusal.Error.Message}
	switch resp.StatusCode {
	case http.StatusRequestTimeout, http.StatusTooManyRequests:
		return nil, true, e
	case http.StatusNotFound, http.StatusForbidden: // also forbidden, which Google answers when the caller may not list
		return nil, false, fmt.Errorf("%w: %w", fs.ErrNotExist, e)
	}
	return nil, resp.StatusCode >= http.StatusInternalServerError, e
}

// message makes a call and decodes the answer into out.
func (b *gcsBucket) message(ctx context.Context, method, address, contentType string, body []byte, out any) error {
	resp, err := b.call(ctx, method, address, contentType, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusNoContent {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxMessage)).Decode(out); err != nil {
		return fmt.Errorf("reading the answer: %w", err)
	}
	return nil
}

// gcsObject holds the fields of Google's description of an object that this package uses.
type gcsObject struct {
	Name               string `json:"name,omitempty"`
	ContentType        string `json:"contentType,omitempty"`
	ContentDisposition string `json:"contentDisposition,omitempty"`
	MD5                []byte `json:"md5Hash,omitempty"`
	Size               int64  `json:"size,omitempty,string"`
}

func (b *gcsBucket) put(ctx context.Context, name string, data []byte, k kind, fresh bool) error {
	sum := md5.Sum(data) //nolint:gosec // as the import
	about, err := json.Marshal(gcsObject{Name: name, ContentType: k.contentType, ContentDisposition: k.contentDisposition, MD5: sum[:]})
	if err != nil {
		return fmt.Errorf("encoding a request: %w", err)
	}
	var body bytes.Buffer
	body.Grow(len(data) + 1024)
	parts := multipart.NewWriter(&body)
	for _, part := range []struct {
		contentType string
		content     []byte
	}{{"application/json; charset=UTF-8", about}, {k.contentType, data}} {
		w, err := parts.CreatePart(textproto.MIMEHeader{"Content-Type": {part.contentType}})
		if err == nil {
			_, err = w.Write(part.content)
		}
		if err != nil {
			return fmt.Errorf("encoding a request: %w", err)
		}
	}
	if err := parts.Close(); err != nil {
		return fmt.Errorf("encoding a request: %w", err)
	}
	address := b.base + "/upload/storage/v1/b/" + url.PathEscape(b.bucket) + "/o?uploadType=multipart"
	if fresh {
		address += "&ifGenerationMatch=0"
	}
	var made gcsObject
	err = b.message(ctx, http.MethodPost, address, "multipart/related; boundary="+parts.Boundary(), body.Bytes(), &made)
	var refusal *gcsError
	if fresh && errors.As(err, &refusal) && refusal.code == http.StatusPreconditionFailed {
		return fmt.Errorf("%w: %w", fs.ErrExist, err)
	}
	return err
}

func (b *gcsBucket) read(ctx context.Context, name string) (io.ReadCloser, int64, error) {
	resp, err := b.call(ctx, http.MethodGet, b.base+b.object(name)+"?alt=media", "", nil)
	if err != nil {
		return nil, 0, err
	}
	if want, ok := crc32cOf(resp.Header); ok {
		resp.Body = &checkedBody{ReadCloser: resp.Body, sum: crc32.New(castagnoli), want: want}
	}
	return resp.Body, resp.ContentLength, nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// crc32cOf returns the checksum of the object that an answer carries. An object that Google
// decompresses on the way has the checksum of its compressed form, which says nothing here.
func crc32cOf(h http.Header) (sum uint32, ok bool) {
	if encoding := h.Get("X-Goog-Stored-Content-Encoding"); encoding != "" && encoding != "identity" {
		return 0, false
	}
	for hash := range strings.SplitSeq(strings.Join(h.Values("X-Goog-Hash"), ","), ",") {
		if text, is := strings.CutPrefix(strings.TrimSpace(hash), "crc32c="); is {
			raw, err := base64.StdEncoding.DecodeString(text)
			if err == nil && len(raw) == 4 {
				return binary.BigEndian.Uint32(raw), true
			}
		}
	}
	return 0, false
}

// checkedBody is the content of an object. At its end it returns an error in place of io.EOF when
// the checksum differs.
type checkedBody struct {
	io.ReadCloser
	sum  hash.Hash32
	want uint32
}

func (b *checkedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	_, _ = b.sum.Write(p[:n]) // never fails
	if errors.Is(err, io.EOF) && b.sum.Sum32() != b.want {
		err = errors.New("its CRC32C differs from the one that Google Cloud Storage sent with it")
	}
	return n, err
}

func (b *gcsBucket) size(ctx context.Context, name string) (int64, error) {
	var o gcsObject
	err := b.message(ctx, http.MethodGet, b.base+b.object(name), "", nil, &o)
	return o.Size, err
}

func (b *gcsBucket) list(ctx context.Context, prefix, after string, most int) (names []string, err error) {
	query := url.Values{"prefix": {prefix}, "maxResults": {strconv.Itoa(min(most, 1000))}, "fields": {"items(name),nextPageToken"}}
	if after != "" {
		query.Set("startOffset", after) // the first name, which may be that one
	}
	for {
		var list struct {
			Items         []gcsObject `json:"items"`
			NextPageToken string      `json:"nextPageToken"`
		}
		err := b.message(ctx, http.MethodGet, b.base+"/storage/v1/b/"+url.PathEscape(b.bucket)+"/o?"+query.Encode(), "", nil, &list)
		if err != nil {
			return nil, err
		}
		for _, o := range list.Items {
			if o.Name > after {
				names = append(names, o.Name)
			}
		}
		if len(names) >= most || list.NextPageToken == "" {
			return names[:min(len(names), most)], nil
		}
		query.Set("pageToken", list.NextPageToken) // a page may be empty before the last one
	}
}

// gcsUpload is a resumable upload: https://cloud.google.com/storage/docs/resumable-uploads
type gcsUpload struct {
	*gcsBucket
	session string // URL that takes the parts
	at      int64  // bytes that were written
}

func (b *gcsBucket) upload(ctx context.Context, name string, k kind) (upload, error) {
	about, err := json.Marshal(gcsObject{Name: name, ContentType: k.contentType, ContentDisposition: k.contentDisposition})
	if err != nil {
		return nil, fmt.Errorf("encoding a request: %w", err)
	}
	address := b.base + "/upload/storage/v1/b/" + url.PathEscape(b.bucket) + "/o?uploadType=resumable"
	resp, err := b.call(ctx, http.MethodPost, address, "application/json; charset=UTF-8", about)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	session, err := resp.Location() // also of a relative URL
	if err != nil {
		return nil, fmt.Errorf("beginning an upload: %w", err)
	}
	return &gcsUpload{gcsBucket: b, session: session.String()}, nil
}

func (u *gcsUpload) part(ctx context.Context, data []byte, last bool) error {
	total := "*"
	if last {
		total = strconv.FormatInt(u.at+int64(len(data)), 10)
	}
	span := "*" // an empty object has no range
	if len(data) > 0 {
		span = fmt.Sprintf("%d-%d", u.at, u.at+int64(len(data))-1)
	}
	resp, err := u.call(ctx, http.MethodPut, u.session, "", data, "Content-Range", "bytes "+span+"/"+total)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if complete := resp.StatusCode != http.StatusPermanentRedirect; complete != last {
		return fmt.Errorf("uploading a part: Google Cloud Storage answers %d", resp.StatusCode)
	}
	u.at += int64(len(data))
	if range_ := resp.Header.Get("Range"); !last && range_ != fmt.Sprintf("bytes=0-%d", u.at-1) {
		return fmt.Errorf("uploading a part: Google Cloud Storage has stored %q of the first %d bytes", range_, u.at)
	}
	return nil
}

func (u *gcsUpload) abort(ctx context.Context) error {
	resp, err := u.call(ctx, http.MethodDelete, u.session, "", nil)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

func (b *gcsBucket) delete(ctx context.Context, name string) error {
	var nothing struct{}
	return b.message(ctx, http.MethodDelete, b.base+b.object(name), "", nil, &nothing)
}

// sign returns a signed URL of version 4:
// https://cloud.google.com/storage/docs/authentication/canonical-requests
func (b *gcsBucket) sign(ctx context.Context, name string, lifetime time.Duration) (string, error) {
	signer := b.accessID
	if signer == "" && b.credentials != nil {
		var err error
		if signer, err = b.credentials.Email(ctx); err != nil {
			return "", fmt.Errorf("finding the service account that signs: %w", err)
		}
	}
	if signer == "" {
		return "", errors.New("the credentials are none of a service account: name one in the parameter access_id")
	}
	u, err := url.Parse(b.base)
	if err != nil {
		return "", err
	}
	u.Path = "/" + b.bucket + "/" + name
	now := time.Now().UTC()
	at, region := now.Format("20060102T150405Z"), now.Format("20060102")+"/auto/storage/goog4_request"
	query := url.Values{
		"X-Goog-Algorithm": {"GOOG4-RSA-SHA256"}, "X-Goog-Credential": {signer + "/" + region}, "X-Goog-Date": {at},
		"X-Goog-Expires": {strconv.Itoa(int(lifetime.Seconds()))}, "X-Goog-SignedHeaders": {"host"},
	}
	encoded := strings.ReplaceAll(query.Encode(), "+", "%20")
	request := sha256.Sum256([]byte(strings.Join([]string{http.MethodGet, u.EscapedPath(), encoded, "host:" + u.Host, "", "host", "UNSIGNED-PAYLOAD"}, "\n")))
	text := strings.Join([]string{"GOOG4-RSA-SHA256", at, region, hex.EncodeToString(request[:])}, "\n")
	signature, err := b.signature(ctx, signer, []byte(text))
	if err != nil {
		return "", err
	}
	u.RawQuery = encoded + "&X-Goog-Signature=" + hex.EncodeToString(signature)
	return u.String(), nil
}

// signature signs with the private key. Without one, Google signs for the service account, which
// needs the permission iam.serviceAccounts.signBlob.
func (b *gcsBucket) signature(ctx context.Context, signer string, text []byte) ([]byte, error) {
	if b.privateKey != nil {
		key, err := parsePrivateKey(b.privateKey)
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(text)
		return rsa.SignPKCS1v15(rand.Reader, key, crypto.SHA256, sum[:])
	}
	body, err := json.Marshal(map[string]string{"payload": base64.StdEncoding.EncodeToString(text)})
	if err != nil {
		return nil, fmt.Errorf("encoding a request: %w", err)
	}
	var answer struct {
		Signature []byte `json:"signedBlob"`
	}
	address := b.signing + "/v1/projects/-/serviceAccounts/" + url.PathEscape(signer) + ":signBlob"
	if err := b.message(ctx, http.MethodPost, address, "application/json", body, &answer); err != nil {
		return nil, fmt.Errorf("signing by the service account: %w", err)
	}
	return answer.Signature, nil
}

func parsePrivateKey(text []byte) (*rsa.PrivateKey, error) {
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, errors.New("the private key is not PEM")
	}
	if key, err := x509.ParsePKCS1PrivateKey(block.Bytes); err == nil {
		return key, nil
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("reading the private key: %w", err)
	}
	key, ok := parsed.(*rsa.PrivateKey)
	if !ok {
		return nil, errors.New("the private key is not RSA")
	}
	return key, nil
}
