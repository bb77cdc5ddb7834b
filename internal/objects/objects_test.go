package objects_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/objects"
	"github.com/latticekeep/latticekeep/test/s3test"
)

func open(t *testing.T, rawURL string, o objects.SigningOptions) *objects.Bucket {
	t.Helper()
	b, err := objects.Open(t.Context(), rawURL, o)
	if err != nil {
		t.Fatalf("opening the bucket: %v", err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

func bucketOf(t *testing.T, s *s3test.Server, name string) string {
	t.Helper()
	rawURL, err := s.Bucket(name)
	if err != nil {
		t.Fatal(err)
	}
	return rawURL
}

// eachBucket runs a test on a folder, on a server of Google's protocol, and on a real S3 server.
// gone removes the bucket without the client's knowledge.
func eachBucket(t *testing.T, test func(t *testing.T, b *objects.Bucket, gone func() error)) {
	t.Run("folder", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "made", "when absent")
		test(t, open(t, "file://"+dir, objects.SigningOptions{}), func() error { return os.RemoveAll(dir) })
	})
	for name, prefix := range map[string]string{"gs": "", "gs below a prefix": "?prefix=latticekeep/"} {
		t.Run(name, func(t *testing.T) {
			g := newGCS(t, "reports")
			test(t, open(t, "gs://reports"+prefix, objects.SigningOptions{}), func() error { g.remove("reports"); return nil })
		})
	}
	t.Run("s3", func(t *testing.T) {
		s := s3test.ForTest(t)
		test(t, open(t, bucketOf(t, s, "reports"), objects.SigningOptions{}), func() error { return s.RemoveBucket("reports") })
	})
	t.Run("s3 below a prefix", func(t *testing.T) {
		s := s3test.ForTest(t)
		test(t, open(t, bucketOf(t, s, "reports")+"&prefix=latticekeep/", objects.SigningOptions{}), func() error { return s.RemoveBucket("reports") })
	})
}

func TestAnObjectIsReadAsItWasLastWritten(t *testing.T) {
	eachBucket(t, func(t *testing.T, b *objects.Bucket, _ func() error) {
		ctx, name := t.Context(), "reports/ten_a/soc2-17-0123456789ab.pdf"
		expect := func(there bool) {
			t.Helper()
			if got, err := b.Exists(ctx, name); err != nil || got != there {
				t.Fatalf("exists: %v %v, want %v", got, err, there)
			}
		}
		expect(false)
		if _, err := b.Get(ctx, name); fault.Of(err) != fault.NotFound {
			t.Fatalf("reading what is not there: %v", err)
		}
		// The last object is larger than one part of an upload by the SDK.
		for _, data := range [][]byte{[]byte("first"), {}, []byte("the last one"), bytes.Repeat([]byte("0123456789abcdef"), 20<<16)} {
			if err := b.Put(ctx, name, data); err != nil {
				t.Fatal(err)
			}
			expect(true)
			if got, err := b.Get(ctx, name); err != nil || !bytes.Equal(got, data) {
				t.Fatalf("got %d bytes, want %d: %v", len(got), len(data), err)
			}
		}
		for n, want := range map[int]string{0: "", 4: "0123", 20 << 21: strings.Repeat("0123456789abcdef", 20<<16)} {
			if got, err := b.GetStart(ctx, name, n); err != nil || string(got) != want {
				t.Fatalf("of the first %d bytes got %d: %v", n, len(got), err)
			}
		}
		if _, err := b.GetStart(ctx, "reports/none", 4); fault.Of(err) != fault.NotFound {
			t.Fatalf("reading the start of what is not there: %v", err)
		}
		// A name that is a prefix of another one is a different object.
		if there, err := b.Exists(ctx, strings.TrimSuffix(name, ".pdf")); err != nil || there {
			t.Fatalf("a prefix of a name exists: %v %v", there, err)
		}
		if err := b.Delete(ctx, name); err != nil {
			t.Fatal(err)
		}
		expect(false)
		if err := b.Delete(ctx, name); err != nil {
			t.Fatalf("deleting what is not there: %v", err)
		}
	})
}

// Of several writers one makes the object, and nobody replaces it.
func TestAnObjectIsMadeOnce(t *testing.T) {
	eachBucket(t, func(t *testing.T, b *objects.Bucket, _ func() error) {
		ctx, name := t.Context(), "commits/a/1"
		errs := make([]error, 8)
		var writers sync.WaitGroup
		for i := range errs {
			writers.Go(func() { errs[i] = b.Create(ctx, name, []byte{byte(i)}) })
		}
		writers.Wait()
		made := -1
		for i, err := range errs {
			switch {
			case err == nil && made < 0:
				made = i
			case err == nil:
				t.Errorf("%d and %d have made the object", made, i)
			case fault.Of(err) != fault.Conflict && fault.Of(err) != fault.Unavailable:
				t.Errorf("making it at the same time: %v", err)
			}
		}
		if err := b.Create(ctx, name, []byte("late")); fault.Of(err) != fault.Conflict {
			t.Errorf("making it again: %v", err)
		}
		if got, err := b.Get(ctx, name); err != nil || made < 0 || !bytes.Equal(got, []byte{byte(made)}) {
			t.Errorf("got %v of writer %d: %v", got, made, err)
		}
		if err := b.Create(ctx, "commits/a/2", nil); err != nil {
			t.Errorf("making another: %v", err)
		}
	})
}

func TestABucketThatIsGoneIsUnavailable(t *testing.T) {
	eachBucket(t, func(t *testing.T, b *objects.Bucket, gone func() error) {
		ctx := t.Context()
		if err := b.Put(ctx, "a", []byte("a")); err != nil {
			t.Fatal(err)
		}
		if err := gone(); err != nil {
			t.Fatal(err)
		}
		calls := map[string]error{"put": b.Put(ctx, "x/y", []byte("y")), "create": b.Create(ctx, "x/y", []byte("y")), "delete": b.Delete(ctx, "a")}
		_, calls["get"] = b.Get(ctx, "a")
		_, calls["exists"] = b.Exists(ctx, "a")
		for call, err := range calls {
			if fault.Of(err) != fault.Unavailable {
				t.Errorf("%s: %v", call, err)
			}
			if m := fault.Message(err); !strings.Contains(m, "check that its bucket exists") || strings.Contains(m, "reports") {
				t.Errorf("%s: the message is %q", call, m)
			}
		}
	})
}

func TestAServerThatIsGoneOrHangsIsUnavailable(t *testing.T) {
	s := s3test.ForTest(t)
	b := open(t, bucketOf(t, s, "reports"), objects.SigningOptions{})
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Get(t.Context(), "a"); fault.Of(err) != fault.Unavailable {
		t.Errorf("a server that is gone: %v", err)
	}
	// This server accepts connections and never answers.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	b = open(t, "s3://reports?region=us-east-1&use_path_style=true&endpoint="+url.QueryEscape("http://"+l.Addr().String()), objects.SigningOptions{})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := b.Put(ctx, "a", []byte("a")); fault.Of(err) != fault.Unavailable {
		t.Errorf("a server that hangs: %v", err)
	}
}

// The client repeats a request whose answer is lost. What it finds then is its own object.
func TestAnUploadWhoseAnswerIsLostSucceeds(t *testing.T) {
	s := s3test.ForTest(t)
	target, err := url.Parse(s.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	forward := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(target)
		r.Out.Host = r.In.Host // the signature covers the host
	}}
	var tries atomic.Int64 // of what makes an object
	losing := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		makes := r.Method == http.MethodPut && r.Header.Get("If-None-Match") != "" || r.Method == http.MethodPost && r.URL.Query().Has("uploadId")
		if makes && tries.Add(1) == 1 {
			forward.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler) // the service has done it, and nobody hears
		}
		if makes && r.Method == http.MethodPost { // some services have forgotten an upload that is complete
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `<Error><Code>NoSuchUpload</Code></Error>`)
			return
		}
		forward.ServeHTTP(w, r)
	}))
	defer losing.Close()
	b := open(t, strings.Replace(bucketOf(t, s, "backups"), url.QueryEscape(s.Endpoint), url.QueryEscape(losing.URL), 1), objects.SigningOptions{})
	for name, write := range map[string]func(name string) error{
		"create": func(name string) error { return b.Create(t.Context(), name, []byte("mine")) },
		"upload": func(name string) error {
			return b.Upload(t.Context(), name, func(w io.Writer) error {
				_, err := w.Write([]byte("mine"))
				return err
			})
		},
	} {
		tries.Store(0)
		if err := write(name); err != nil || tries.Load() < 2 {
			t.Errorf("%s: %v, after %d tries", name, err, tries.Load())
		}
		if got, err := b.Get(t.Context(), name); err != nil || string(got) != "mine" {
			t.Errorf("%s: %q, %v", name, got, err)
		}
		// What somebody else has written, even of the same content, is not its own.
		tries.Store(1)
		if err := b.Create(t.Context(), name, []byte("mine")); fault.Of(err) != fault.Conflict {
			t.Errorf("%s, once more: %v", name, err)
		}
	}
}

// An answer of "not found" counts only when a listing confirms it.
func TestAnObjectThatMayNotBeReadIsNotMissing(t *testing.T) {
	s := s3test.ForTest(t)
	target, err := url.Parse(s.Endpoint)
	if err != nil {
		t.Fatal(err)
	}
	forward := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(target)
		r.Out.Host = r.In.Host // the signature covers the host
	}}
	lying := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPut && strings.HasSuffix(r.URL.Path, "/checkpoint") {
			http.NotFound(w, r)
			return
		}
		forward.ServeHTTP(w, r)
	}))
	defer lying.Close()
	b := open(t, strings.Replace(bucketOf(t, s, "anchors"), url.QueryEscape(s.Endpoint), url.QueryEscape(lying.URL), 1), objects.SigningOptions{})
	if _, err := b.Get(t.Context(), "anchor/checkpoint"); fault.Of(err) != fault.NotFound {
		t.Fatalf("before it was written: %v", err)
	}
	if err := b.Put(t.Context(), "anchor/checkpoint", []byte("note")); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Get(t.Context(), "anchor/checkpoint"); fault.Of(err) != fault.Unavailable {
		t.Errorf("reading it: %v", err)
	}
	if _, err := b.Exists(t.Context(), "anchor/checkpoint"); fault.Of(err) != fault.Unavailable {
		t.Errorf("looking for it: %v", err)
	}
}

func TestNamesAreStrict(t *testing.T) {
	b := open(t, "file://"+t.TempDir(), objects.SigningOptions{BaseURL: "https://a.example/d", Secret: make([]byte, 32)})
	for _, name := range []string{
		"", "/", "/a", "a/", "a//b", "..", "../a", "a/..", "a/../b", ".a", "a/.b", "-a", "A", "ä", "a b", "a\x00", "a\n", `a\b`, "a%2fb", "a?b",
		"a.tmp", "a.attrs", "a.tmp/b", strings.Repeat("a", 513),
	} {
		ctx := t.Context()
		_, getting := b.Get(ctx, name)
		_, looking := b.Exists(ctx, name)
		_, signing := b.SignedURL(ctx, name, time.Hour)
		for _, err := range []error{b.Put(ctx, name, nil), b.Delete(ctx, name), getting, looking, signing} {
			if fault.Of(err) != fault.Invalid {
				t.Errorf("name %q: %v", name, err)
			}
		}
	}
	for _, name := range []string{"a", "0/a.b_c-d", "audit/ab12/00000000000000000001-00000000000000000002.jsonl.gz", strings.Repeat("a", 200)} {
		if err := b.Put(t.Context(), name, nil); err != nil {
			t.Errorf("name %q: %v", name, err)
		}
	}
}

func TestOpenSaysWhatIsWrongWithAURL(t *testing.T) {
	for _, rawURL := range []string{
		"", "reports", "/var/lib/reports", "http://example.com/a", "mem://", "file://reports", "file://host/reports", "file:///a?create_dir=1",
		"file:relative", "s3://", "s3://key:secret@reports", "s3://reports?no_such_parameter=1", "s3://re ports", "://",
	} {
		b, err := objects.Open(t.Context(), rawURL, objects.SigningOptions{})
		if fault.Of(err) != fault.Invalid {
			t.Errorf("%q: %v", rawURL, err)
		}
		if b != nil {
			b.Close()
		}
		if strings.Contains(fault.Message(err), "secret@") {
			t.Errorf("the message quotes: %q", fault.Message(err))
		}
	}
}

func TestAPrefixDoesNotLeaveTheBucket(t *testing.T) {
	for query, allowed := range map[string]bool{"..": true, "a..b/": true, "a/": true, "../": false, "../a/": false, "a/../../b/": false, "%2e%2e/a/": false} {
		for _, scheme := range []string{"s3", "gs"} {
			parameters := map[string]string{"s3": "?region=us-east-1&anonymous=true&prefix=", "gs": "?anonymous=true&prefix="}[scheme]
			_, err := objects.Open(t.Context(), scheme+"://reports"+parameters+query, objects.SigningOptions{})
			if allowed && err != nil || !allowed && (fault.Of(err) != fault.Invalid || !strings.Contains(fault.Message(err), "prefix")) {
				t.Errorf("%s, prefix %s: %v", scheme, query, err)
			}
		}
	}
}

func TestAWriteThatFailsLeavesTheFormerObject(t *testing.T) {
	dir := t.TempDir()
	b := open(t, "file://"+dir, objects.SigningOptions{})
	if err := b.Put(t.Context(), "a/b", []byte("former")); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := b.Put(ended, "a/b", []byte("newer")); fault.Of(err) != fault.Unavailable {
		t.Fatalf("a write whose context has ended: %v", err)
	}
	if got, err := b.Get(t.Context(), "a/b"); err != nil || string(got) != "former" {
		t.Errorf("got %q: %v", got, err)
	}
	if err := b.Put(t.Context(), "a", []byte("where a folder is")); fault.Of(err) != fault.Unavailable {
		t.Errorf("a write onto a folder: %v", err)
	}
	if files := filesOf(t, dir); len(files) != 1 {
		t.Errorf("there are %v", files)
	}
}

// A reader of a name that is being written gets one complete object or the other.
func TestReadersSeeWholeObjects(t *testing.T) {
	b := open(t, "file://"+t.TempDir(), objects.SigningOptions{})
	versions := [][]byte{bytes.Repeat([]byte("a"), 1<<16), bytes.Repeat([]byte("b"), 1<<18)}
	if err := b.Put(t.Context(), "name", versions[0]); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		for i := range 50 {
			if err := b.Put(t.Context(), "name", versions[i%2]); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for {
		got, err := b.Get(t.Context(), "name")
		if err != nil || !(bytes.Equal(got, versions[0]) || bytes.Equal(got, versions[1])) {
			t.Fatalf("a mixture of %d bytes: %v", len(got), err)
		}
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			return
		default:
		}
	}
}

func TestAFolderIsForItsUserAlone(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "reports")
	b := open(t, "file://"+dir, objects.SigningOptions{})
	if err := b.Put(t.Context(), "a/b", []byte("b")); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]fs.FileMode{"": 0o700 | fs.ModeDir, "a": 0o700 | fs.ModeDir, "a/b": 0o600} {
		info, err := os.Stat(filepath.Join(dir, path))
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != want {
			t.Errorf("the mode of %q is %s", path, info.Mode())
		}
	}
}

func TestOpenRemovesWhatAnEndedWriteLeft(t *testing.T) {
	dir := t.TempDir()
	long := time.Now().Add(-2 * time.Hour)
	for name, old := range map[string]bool{"left.1.tmp": true, "being-written.2.tmp": false, "object": true} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if old {
			if err := os.Chtimes(path, long, long); err != nil {
				t.Fatal(err)
			}
		}
	}
	open(t, "file://"+dir, objects.SigningOptions{})
	if got := strings.Join(filesOf(t, dir), " "); got != "being-written.2.tmp object" {
		t.Errorf("there are %s", got)
	}
}

func filesOf(t *testing.T, dir string) (files []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files = append(files, filepath.Base(path))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func TestAPresignedURLReadsOneObjectForItsLifetime(t *testing.T) {
	s := s3test.ForTest(t)
	b := open(t, bucketOf(t, s, "reports"), objects.SigningOptions{})
	for _, name := range []string{"a/report.pdf", "a/other.pdf"} {
		if err := b.Put(t.Context(), name, []byte("the bytes of "+name)); err != nil {
			t.Fatal(err)
		}
	}
	signed, err := b.SignedURL(t.Context(), "a/report.pdf", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	status, body, header := fetch(t, signed)
	if status != http.StatusOK || body != "the bytes of a/report.pdf" {
		t.Fatalf("status %d, body %q", status, body)
	}
	if got := header.Get("Content-Type"); got != "application/pdf" {
		t.Errorf("content type %q", got)
	}
	if got := header.Get("Content-Disposition"); got != `attachment; filename="report.pdf"` {
		t.Errorf("content disposition %q", got)
	}
	for what, altered := range map[string]string{
		"another object":    strings.Replace(signed, "report.pdf", "other.pdf", 1),
		"a longer lifetime": strings.Replace(signed, "X-Amz-Expires=3600", "X-Amz-Expires=7200", 1),
		"no signature":      strings.SplitN(signed, "?", 2)[0],
	} {
		if altered == signed {
			t.Fatalf("%s: nothing was altered in %s", what, signed)
		}
		if status, _, _ := fetch(t, altered); status != http.StatusForbidden {
			t.Errorf("%s: status %d", what, status)
		}
	}
	// The server uses its own clock, so wait for the expiry.
	if signed, err = b.SignedURL(t.Context(), "a/report.pdf", time.Second); err != nil {
		t.Fatal(err)
	}
	for status != http.StatusForbidden {
		if status, _, _ = fetch(t, signed); t.Context().Err() != nil {
			t.Fatal("the URL did not end")
		}
	}
}

func fetch(t *testing.T, rawURL string) (status int, body string, header http.Header) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, rawURL, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	if err = errors.Join(err, resp.Body.Close()); err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b), resp.Header
}
