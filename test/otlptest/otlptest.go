// Package otlptest receives traces (OTLP over HTTP) in tests.
package otlptest

import (
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	spanpb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// Receiver receives OTLP over HTTP on loopback.
type Receiver struct {
	*httptest.Server
	t *testing.T

	mu     sync.Mutex
	Bodies [][]byte
	Spans  []*spanpb.Span
	Whose  map[string]string // attributes of the resource
}

func NewReceiver(t *testing.T) *Receiver {
	r := &Receiver{t: t, Whose: make(map[string]string)}
	r.Server = httptest.NewServer(r)
	t.Cleanup(r.Close)
	return r
}

func (r *Receiver) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	body, err := io.ReadAll(request.Body)
	message := new(spanpb.TracesData) // has the same encoding as the protocol's request
	if err == nil {
		err = proto.Unmarshal(body, message)
	}
	if err != nil || request.URL.Path != "/v1/traces" {
		r.t.Errorf("%s: %v", request.URL.Path, err)
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.Bodies = append(r.Bodies, body)
	for _, of := range message.GetResourceSpans() {
		for _, a := range of.GetResource().GetAttributes() {
			r.Whose[a.GetKey()] = a.GetValue().GetStringValue()
		}
		for _, in := range of.GetScopeSpans() {
			r.Spans = append(r.Spans, in.GetSpans()...)
		}
	}
}

// Of returns the spans with a name.
func (r *Receiver) Of(name string) (found []*spanpb.Span) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.Spans {
		if s.GetName() == name {
			found = append(found, s)
		}
	}
	return found
}

func AttributeOf(s *spanpb.Span, key string) string {
	for _, a := range s.GetAttributes() {
		if a.GetKey() == key {
			return a.GetValue().GetStringValue()
		}
	}
	return ""
}
