package objects_test

import (
	"cmp"
	"context"
	"crypto"
	"crypto/md5"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"mime"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
)

// gcs implements the parts of the JSON interface of Google Cloud Storage that are used.
type gcs struct {
	mu      sync.Mutex
	objects map[string]map[string]gcsObject // by bucket and name
	failing int                             // number of calls that are answered with 503
	calls   int

	damaged    bool // objects lose a bit on the way
	unreadable bool // objects may be listed, not read
	emptyPages int  // so many pages of a list come before the one that has anything

	uploads map[string]*gcsObject // in parts, by the path of the session
}

type gcsObject struct {
	about map[string]any
	data  []byte
}

func newGCS(t *testing.T, buckets ...string) *gcs {
	t.Helper()
	g := &gcs{objects: make(map[string]map[string]gcsObject), uploads: make(map[string]*gcsObject)}
	for _, b := range buckets {
		g.objects[b] = make(map[string]gcsObject)
	}
	server := httptest.NewServer(g)
	t.Cleanup(server.Close)
	t.Setenv("STORAGE_EMULATOR_HOST", strings.TrimPrefix(server.URL, "http://"))
	return g
}

// remove deletes a bucket, as an administrator may.
func (g *gcs) remove(bucket string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.objects, bucket)
}

func refuse(w http.ResponseWriter, code int) {
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{"code": code, "message": http.StatusText(code)}})
}

func (g *gcs) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.calls++; g.failing > 0 {
		g.failing--
		refuse(w, http.StatusServiceUnavailable)
		return
	}
	if o := g.uploads[r.URL.Path]; o != nil {
		g.part(w, r, o)
		return
	}
	path, upload := strings.CutPrefix(r.URL.EscapedPath(), "/upload")
	parts := strings.Split(strings.TrimPrefix(path, "/storage/v1/b/"), "/")
	bucket, ok := g.objects[parts[0]]
	if !ok || len(parts) < 2 || parts[1] != "o" {
		refuse(w, http.StatusNotFound)
		return
	}
	if upload {
		g.upload(w, r, bucket)
		return
	}
	if len(parts) == 2 {
		if page, _ := strconv.Atoi(r.URL.Query().Get("pageToken")); page < g.emptyPages {
			_ = json.NewEncoder(w).Encode(map[string]any{"kind": "storage#objects", "nextPageToken": strconv.Itoa(page + 1)})
			return
		}
		items, next := []map[string]any(nil), ""
		for _, name := range slices.Sorted(maps.Keys(bucket)) {
			switch query := r.URL.Query(); {
			case !strings.HasPrefix(name, query.Get("prefix")) || name < query.Get("startOffset") || g.emptyPages == 0 && name < query.Get("pageToken"):
			case fmt.Sprint(len(items)) == query.Get("maxResults"):
				next = cmp.Or(next, name)
			default:
				items = append(items, bucket[name].about)
			}
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"kind": "storage#objects", "items": items, "nextPageToken": next})
		return
	}
	name, err := url.PathUnescape(parts[2])
	o, ok := bucket[name]
	switch {
	case err != nil || len(parts) != 3 || !ok || g.unreadable:
		refuse(w, http.StatusNotFound)
	case r.Method == http.MethodDelete:
		delete(bucket, name)
		w.WriteHeader(http.StatusNoContent)
	case r.URL.Query().Get("alt") == "media":
		sum := crc32.Checksum(o.data, crc32.MakeTable(crc32.Castagnoli))
		w.Header().Add("X-Goog-Hash", "crc32c="+base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, sum)))
		w.Header().Add("X-Goog-Hash", "md5="+fmt.Sprint(o.about["md5Hash"]))
		data := slices.Clone(o.data)
		if g.damaged {
			data[0] ^= 1
		}
		_, _ = w.Write(data)
	default:
		_ = json.NewEncoder(w).Encode(o.about)
	}
}

// part takes a part of an upload, or its end.
func (g *gcs) part(w http.ResponseWriter, r *http.Request, o *gcsObject) {
	if r.Method == http.MethodDelete {
		delete(g.uploads, r.URL.Path)
		w.WriteHeader(499)
		return
	}
	data, err := io.ReadAll(r.Body)
	span := fmt.Sprintf("bytes %d-%d/", len(o.data), len(o.data)+len(data)-1)
	if len(data) == 0 {
		span = "bytes */"
	}
	o.data = append(o.data, data...)
	total, ok := strings.CutPrefix(r.Header.Get("Content-Range"), span)
	switch {
	case err != nil || !ok || total == "*" && len(data)%(256<<10) != 0:
		refuse(w, http.StatusBadRequest)
	case total == "*":
		w.Header().Set("Range", fmt.Sprintf("bytes=0-%d", len(o.data)-1))
		w.WriteHeader(http.StatusPermanentRedirect)
	case total != fmt.Sprint(len(o.data)):
		refuse(w, http.StatusBadRequest)
	default:
		delete(g.uploads, r.URL.Path)
		o.about["size"] = total
		g.objects["reports"][o.about["name"].(string)] = *o
		_ = json.NewEncoder(w).Encode(o.about)
	}
}

func (g *gcs) upload(w http.ResponseWriter, r *http.Request, bucket map[string]gcsObject) {
	if r.URL.Query().Get("uploadType") == "resumable" {
		var o gcsObject
		if err := json.NewDecoder(r.Body).Decode(&o.about); err != nil {
			refuse(w, http.StatusBadRequest)
			return
		}
		session := "/session/" + rand.Text()
		g.uploads[session] = &o
		w.Header().Set("Location", session)
		return
	}
	kind, parameters, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "multipart/related" || r.URL.Query().Get("uploadType") != "multipart" {
		refuse(w, http.StatusBadRequest)
		return
	}
	fresh := r.URL.Query().Get("ifGenerationMatch") == "0"
	parts, o := multipart.NewReader(r.Body, parameters["boundary"]), gcsObject{}
	about, err := parts.NextPart()
	if err == nil {
		err = json.NewDecoder(about).Decode(&o.about)
	}
	if err != nil {
		refuse(w, http.StatusBadRequest)
		return
	}
	media, err := parts.NextPart()
	if err == nil {
		o.data, err = io.ReadAll(media)
	}
	sum := md5.Sum(o.data)
	if err != nil || media.Header.Get("Content-Type") != o.about["contentType"] || o.about["md5Hash"] != base64.StdEncoding.EncodeToString(sum[:]) {
		refuse(w, http.StatusBadRequest)
		return
	}
	if _, there := bucket[o.about["name"].(string)]; there && fresh {
		refuse(w, http.StatusPreconditionFailed)
		return
	}
	o.about["size"] = fmt.Sprint(len(o.data))
	bucket[o.about["name"].(string)] = o
	_ = json.NewEncoder(w).Encode(o.about)
}

func TestACallOfGoogleIsRepeatedWhenItIsBusy(t *testing.T) {
	g := newGCS(t, "reports")
	b := open(t, "gs://reports", objects.SigningOptions{})
	g.failing = 2
	if err := b.Put(t.Context(), "a/b.pdf", []byte("b")); err != nil || g.calls != 3 {
		t.Errorf("after %d calls: %v", g.calls, err)
	}
	g.failing, g.calls = 100, 0
	if err := b.Put(t.Context(), "a/b.pdf", []byte("c")); fault.Of(err) != fault.Unavailable || g.calls != 5 {
		t.Errorf("after %d calls: %v", g.calls, err)
	}
	g.failing = 0
	if got, err := b.Get(t.Context(), "a/b.pdf"); err != nil || string(got) != "b" {
		t.Errorf("the object is %q: %v", got, err)
	}
	about := g.objects["reports"]["a/b.pdf"].about
	if about["contentType"] != "application/pdf" || about["contentDisposition"] != `attachment; filename="b.pdf"` {
		t.Errorf("the object is described as %v", about)
	}
}

func TestAnObjectOfGoogleThatIsDamagedOnTheWayIsRefused(t *testing.T) {
	g := newGCS(t, "reports")
	b := open(t, "gs://reports", objects.SigningOptions{})
	if err := b.Put(t.Context(), "a", []byte("a")); err != nil {
		t.Fatal(err)
	}
	g.damaged = true
	if got, err := b.Get(t.Context(), "a"); fault.Of(err) != fault.Unavailable || !strings.Contains(err.Error(), "CRC32C") {
		t.Errorf("a damaged object is %q: %v", got, err)
	}
	g.damaged = false
	if got, err := b.Get(t.Context(), "a"); err != nil || string(got) != "a" {
		t.Errorf("the object is %q: %v", got, err)
	}
}

func TestAURLOfGoogleIsSignedByAPrivateKey(t *testing.T) {
	newGCS(t, "reports")
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatalf("making a key: %v", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatalf("encoding the key: %v", err)
	}
	path := filepath.Join(t.TempDir(), "key.pem")
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600); err != nil {
		t.Fatalf("writing the key: %v", err)
	}
	b := open(t, "gs://reports?access_id=a%40test.iam.gserviceaccount.com&prefix=p/&private_key_path="+path, objects.SigningOptions{})
	signed, err := b.SignedURL(t.Context(), "a/b.pdf", time.Hour)
	if err != nil {
		t.Fatalf("signing: %v", err)
	}
	u, err := url.Parse(signed)
	if err != nil {
		t.Fatalf("reading the URL: %v", err)
	}
	query, signature, _ := strings.Cut(u.RawQuery, "&X-Goog-Signature=")
	q := u.Query()
	if u.Path != "/reports/p/a/b.pdf" || q.Get("X-Goog-Expires") != "3600" || !strings.HasPrefix(q.Get("X-Goog-Credential"), "a@test.iam.gserviceaccount.com/") {
		t.Errorf("the URL is %s", signed)
	}
	request := sha256.Sum256([]byte("GET\n/reports/p/a/b.pdf\n" + query + "\nhost:" + u.Host + "\n\nhost\nUNSIGNED-PAYLOAD"))
	_, scope, _ := strings.Cut(q.Get("X-Goog-Credential"), "/")
	text := sha256.Sum256([]byte("GOOG4-RSA-SHA256\n" + q.Get("X-Goog-Date") + "\n" + scope + "\n" + hex.EncodeToString(request[:])))
	bytes, err := hex.DecodeString(signature)
	if err != nil || rsa.VerifyPKCS1v15(&key.PublicKey, crypto.SHA256, text[:], bytes) != nil {
		t.Errorf("the signature is none of the key: %v", err)
	}
}

func TestTheAccountOfTheCredentialsSignsByItselfWhenItIsNamed(t *testing.T) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatalf("making a key: %v", err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatalf("encoding the key: %v", err)
	}
	text, err := json.Marshal(map[string]string{
		"type": "service_account", "client_email": "a@test.iam.gserviceaccount.com", "private_key_id": "k", "token_uri": "http://127.0.0.1:1",
		"private_key": string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})),
	})
	if err != nil {
		t.Fatalf("encoding credentials: %v", err)
	}
	path := filepath.Join(t.TempDir(), "credentials.json")
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatalf("writing credentials: %v", err)
	}
	t.Setenv("GOOGLE_APPLICATION_CREDENTIALS", path)
	for query, byItself := range map[string]bool{
		"": true, "&access_id=a%40test.iam.gserviceaccount.com": true, "&access_id=b%40test.iam.gserviceaccount.com": false,
	} {
		ctx, cancel := context.WithTimeout(t.Context(), map[bool]time.Duration{true: time.Minute, false: time.Second}[byItself])
		// No service answers in this universe, so that only the credentials can sign.
		b := open(t, "gs://reports?universe_domain=test.invalid"+query, objects.SigningOptions{})
		signed, err := b.SignedURL(ctx, "a/b.pdf", time.Hour)
		cancel()
		if byItself != (err == nil) || byItself && !strings.Contains(signed, "X-Goog-Credential=a%40test") {
			t.Errorf("%q: %q, %v", query, signed, err)
		}
	}
}

func TestAnObjectBehindAnEmptyPageIsThere(t *testing.T) {
	g := newGCS(t, "reports")
	b := open(t, "gs://reports", objects.SigningOptions{})
	if err := b.Put(t.Context(), "a/b.pdf", []byte("b")); err != nil {
		t.Fatalf("writing: %v", err)
	}
	g.unreadable, g.emptyPages = true, 2
	if _, err := b.Get(t.Context(), "a/b.pdf"); fault.Of(err) != fault.Unavailable {
		t.Errorf("an object that may not be read: %v", err)
	}
	if _, err := b.Get(t.Context(), "a/c.pdf"); fault.Of(err) != fault.NotFound {
		t.Errorf("an object that is not there: %v", err)
	}
}

func TestParametersOfBucketsFromBeforeAreRead(t *testing.T) {
	newGCS(t, "reports")
	open(t, "gs://reports?grpc=false&zonal=false", objects.SigningOptions{})
	encryption := ""
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		encryption = r.Header.Get("X-Amz-Server-Side-Encryption")
	}))
	defer server.Close()
	b := open(t, "s3://reports?region=eu-west-1&anonymous=true&use_path_style=true&ssetype=aes256&endpoint="+server.URL, objects.SigningOptions{})
	if err := b.Put(t.Context(), "a/b.pdf", []byte("b")); err != nil || encryption != "AES256" {
		t.Errorf("the encryption is %q: %v", encryption, err)
	}
}

func TestABucketWhoseURLCannotBeServedSaysWhatCan(t *testing.T) {
	for address, says := range map[string]string{
		"azblob://reports":            "s3:// or gs://",
		"gs://reports?grpc=true":      "check the parameters",
		"gs://reports?zonal=true":     "check the parameters",
		"s3://reports?use_path_styl=": "check the parameters",
		"s3://reports?fips=perhaps":   "check the parameters",
		"s3://reports?ssetype=none":   "check the parameters",
		"http://reports":              "must begin with",
	} {
		_, err := objects.Open(t.Context(), address, objects.SigningOptions{})
		if fault.Of(err) != fault.Invalid || !strings.Contains(fault.Message(err), says) {
			t.Errorf("%s: %v", address, err)
		}
	}
}
