package admission

import (
	"bytes"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/latticekeep/latticekeep/api/client"
)

// Whatever is posted, the webhook neither panics nor keeps a slot; it admits nothing that it could not read, and what it
// answers is a response to the request's UID.
func FuzzReview(f *testing.F) {
	seeds, err := os.ReadDir("testdata/fuzz/FuzzReview")
	if err != nil || len(seeds) == 0 {
		f.Fatal("no seeds: ", err)
	}
	now := time.Unix(0, 0)
	w, _ := newWebhook(f, nil, func(o *Options) {
		o.Now = func() time.Time { now = now.Add(time.Minute); return now } // one address may ask for ever
	})
	// A network would take its time, and other paths each time.
	down := &http.Client{Transport: roundTripper(func(*http.Request) (*http.Response, error) { return nil, net.ErrClosed })}
	if w.vault.client, err = client.New(w.vault.url, client.WithRetries(0), client.WithHTTPClient(down)); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		answer := post(w, "?timeout=1ms", bytes.NewReader(body))
		nothingInHand(t, w)
		if answer.Code != http.StatusOK {
			return
		}
		var request struct {
			Request struct {
				UID types.UID `json:"uid"`
			} `json:"request"`
		}
		var back admissionv1.AdmissionReview
		if err := json.Unmarshal(answer.Body.Bytes(), &back); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(body, &request); err == nil && request.Request.UID != back.Response.UID && bytes.Count(bytes.ToLower(body), []byte(`uid"`)) == 1 {
			t.Fatal("another UID")
		}
		if back.Response.UID == "" || back.Response.Patch != nil || !back.Response.Allowed && back.Response.Result.Message == "" {
			t.Fatalf("%+v", back.Response)
		}
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
