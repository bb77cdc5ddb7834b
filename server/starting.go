package server

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/diagnosis"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/health"
	"github.com/latticekeep/latticekeep/server/gate"
)

// Starting answers on the listeners of a server whose database cannot be opened yet. /healthz is 200,
// since a restart would not help. Everything else is 503, and /readyz?verbose says why.
type Starting struct {
	servers []*http.Server
	lent    []lentListener
	served  sync.WaitGroup
}

// lentListener is closed by ending the accepting. The listener stays open for its owner.
type lentListener struct{ *net.TCPListener }

// Close makes Accept return.
func (l lentListener) Close() error { return l.SetDeadline(time.Unix(1, 0)) }

// NewStarting answers on a listener, with TLS if encryption is not nil, and on the one for operations,
// which may be nil, until [Starting.End]. reason says what is waited for. diagnose answers /diagnosis
// of the listener for operations; nil: nothing does.
func NewStarting(l *net.TCPListener, encryption *tls.Config, operations *net.TCPListener, reason func() error, diagnose func(context.Context) diagnosis.Report) *Starting {
	s := &Starting{}
	if operations == nil {
		s.serve(l, encryption, probing(reason, fault.Message, nil)) // anybody may ask there
	} else {
		s.serve(l, encryption, http.HandlerFunc(refuseWhileStarting))
		s.serve(operations, nil, probing(reason, error.Error, diagnose))
	}
	return s
}

func (s *Starting) serve(l *net.TCPListener, encryption *tls.Config, handler http.Handler) {
	h := &http.Server{Handler: handler, ReadHeaderTimeout: readHeaderTimeout, ReadTimeout: readTimeout, WriteTimeout: writeTimeout, MaxHeaderBytes: maxHeaderBytes}
	h.SetKeepAlivesEnabled(false) // nobody keeps a connection while there is nothing to do
	lent := lentListener{l}
	s.servers, s.lent = append(s.servers, h), append(s.lent, lent)
	var accepting net.Listener = lent
	if encryption != nil {
		accepting = tls.NewListener(lent, encryption)
	}
	s.served.Go(func() { _ = h.Serve(accepting) }) // until End
}

// End stops answering and gives the listeners back. Connections that arrive meanwhile wait.
func (s *Starting) End() error {
	var errs []error
	for _, h := range s.servers {
		drain, cancel := context.WithTimeout(context.Background(), time.Second)
		if h.Shutdown(drain) != nil {
			errs = append(errs, h.Close()) // nothing that it answers is worth waiting for
		}
		cancel()
	}
	s.served.Wait()
	for _, l := range s.lent {
		errs = append(errs, l.SetDeadline(time.Time{}))
	}
	return errors.Join(errs...)
}

// probing answers the operational endpoints while the server starts. text gives the reason to those
// who may ask.
func probing(reason func() error, text func(error) string, diagnose func(context.Context) diagnosis.Report) http.Handler {
	monitor := health.New(health.Check{Name: "start", Scope: health.Replica, Stops: health.Classes(), Ask: func(context.Context) error { return reason() }})
	mux := http.NewServeMux()
	mux.HandleFunc("/", refuseWhileStarting)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, http.StatusOK, answer{true, "ok"}) })
	if diagnose != nil {
		mux.HandleFunc("GET /diagnosis", func(w http.ResponseWriter, r *http.Request) {
			writeJSON(w, http.StatusOK, diagnosisAnswer{true, diagnose(r.Context())})
		})
	}
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		if !r.URL.Query().Has("verbose") {
			refuseWhileStarting(w, r)
			return
		}
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.WriteHeader(http.StatusServiceUnavailable)
		_, _ = w.Write([]byte(monitor.Report(r.Context()).Text(text)))
	})
	return mux
}

// refuseWhileStarting answers with the envelope of version 2.
func refuseWhileStarting(w http.ResponseWriter, _ *http.Request) {
	id := authz.NewID("req")
	w.Header().Set(gate.RequestIDHeader, id)
	w.Header().Set("Retry-After", "1")
	writeJSON(w, http.StatusServiceUnavailable, map[string]any{"success": false, "error": map[string]any{
		"code": http.StatusServiceUnavailable, "message": http.StatusText(http.StatusServiceUnavailable), "details": "the server is starting: retry",
		"request_id": id, "timestamp": time.Now().UTC(),
	}})
}

func writeJSON(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}
