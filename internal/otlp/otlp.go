// Package otlp sends spans to a receiver of the OpenTelemetry protocol (OTLP), in protobuf over
// HTTP.
//
// It is the transport under the official exporter, which turns spans into messages. The official
// transport, otlptracehttp, adds gRPC to the binary without using it, and gRPC prevents the linker
// from removing unused methods (docs/adr/0014-size.md).
//
// The package reads these environment variables as the OpenTelemetry specification says:
// OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _CLIENT_CERTIFICATE, _CLIENT_KEY and _COMPRESSION. Each
// also exists as OTEL_EXPORTER_OTLP_TRACES_…, which takes precedence.
package otlp

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

const (
	maxAnswer  = 64 << 10        // most bytes that are read from an answer
	retryPause = 5 * time.Second // pause before a retry, unless the receiver sets one
)

// New returns an exporter that posts to endpoint, the full URL of the receiver. Each request takes
// at most timeout. It returns an error for an environment variable that cannot be used.
func New(ctx context.Context, endpoint string, timeout time.Duration) (*otlptrace.Exporter, error) {
	c, err := newClient(endpoint, timeout)
	if err != nil {
		return nil, err
	}
	return otlptrace.New(ctx, c)
}

// client implements [otlptrace.Client].
type client struct {
	endpoint string
	headers  http.Header
	compress bool
	http     *http.Client
	stopped  context.Context // ends with Stop, which cancels every request
	stop     context.CancelFunc
}

func newClient(endpoint string, timeout time.Duration) (*client, error) {
	headers, err := parseHeaders(setting("HEADERS"))
	if err != nil {
		return nil, fmt.Errorf("reading OTEL_EXPORTER_OTLP_HEADERS: %w", err)
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	if transport.TLSClientConfig, err = tlsConfig(); err != nil {
		return nil, err
	}
	c := &client{
		endpoint: endpoint, headers: headers, compress: setting("COMPRESSION") == "gzip",
		http: &http.Client{Transport: transport, Timeout: timeout},
	}
	c.stopped, c.stop = context.WithCancel(context.Background())
	return c, nil
}

// setting returns an environment variable: the one for traces if it is set, otherwise the one for
// all signals.
func setting(name string) string {
	if v := strings.TrimSpace(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_" + name)); v != "" {
		return v
	}
	return strings.TrimSpace(os.Getenv("OTEL_EXPORTER_OTLP_" + name))
}

// parseHeaders parses name=value,name=value with percent-encoded values.
func parseHeaders(text string) (http.Header, error) {
	headers := http.Header{}
	for pair := range strings.SplitSeq(text, ",") {
		if strings.TrimSpace(pair) == "" {
			continue
		}
		name, value, ok := strings.Cut(pair, "=")
		value, err := url.PathUnescape(strings.TrimSpace(value))
		if name = strings.TrimSpace(name); !ok || err != nil || name == "" {
			return nil, errors.New("give name=value, separated by commas, with values percent-encoded")
		}
		headers.Set(name, value)
	}
	return headers, nil
}

// tlsConfig returns the TLS configuration, or nil when no variable names a certificate.
func tlsConfig() (*tls.Config, error) {
	authority, certificate, key := setting("CERTIFICATE"), setting("CLIENT_CERTIFICATE"), setting("CLIENT_KEY")
	if authority == "" && certificate == "" && key == "" {
		return nil, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if authority != "" {
		pem, err := os.ReadFile(authority)
		if err != nil {
			return nil, fmt.Errorf("reading OTEL_EXPORTER_OTLP_CERTIFICATE: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(pem) {
			return nil, errors.New("reading OTEL_EXPORTER_OTLP_CERTIFICATE: the file holds no certificate in PEM")
		}
	}
	if certificate != "" || key != "" {
		pair, err := tls.LoadX509KeyPair(certificate, key)
		if err != nil {
			return nil, fmt.Errorf("reading OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE and _CLIENT_KEY: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// Start implements [otlptrace.Client].
func (c *client) Start(context.Context) error { return nil }

// Stop implements [otlptrace.Client].
func (c *client) Stop(ctx context.Context) error {
	c.stop()
	c.http.CloseIdleConnections()
	return ctx.Err()
}

// UploadTraces implements [otlptrace.Client]. It repeats the request when the receiver asks for
// that and ctx leaves enough time.
func (c *client) UploadTraces(ctx context.Context, spans []*tracepb.ResourceSpans) error {
	// TracesData has the same encoding as the request of the protocol, ExportTraceServiceRequest,
	// whose Go type depends on gRPC.
	body, err := proto.Marshal(&tracepb.TracesData{ResourceSpans: spans})
	if err != nil {
		return fmt.Errorf("encoding spans: %w", err)
	}
	if c.compress {
		var zipped bytes.Buffer
		w := gzip.NewWriter(&zipped)
		_, err := w.Write(body)
		if err = errors.Join(err, w.Close()); err != nil {
			return fmt.Errorf("compressing spans: %w", err)
		}
		body = zipped.Bytes()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.stopped, cancel)() //nolint:contextcheck // the end of the client ends the upload
	for {
		pause, err := c.post(ctx, body)
		if err == nil || pause < 0 {
			return err
		}
		pause = spread(pause)
		if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= pause {
			return err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return err
		}
	}
}

// spread lengthens a pause by up to half, so that processes which fail together do not return
// together.
func spread(pause time.Duration) time.Duration {
	return pause + rand.N(pause/2+1) //nolint:gosec // hides nothing
}

// post makes one request. On failure, pause is the time before a retry; a negative pause means no
// retry.
func (c *client) post(ctx context.Context, body []byte) (pause time.Duration, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.endpoint, bytes.NewReader(body))
	if err != nil {
		return -1, err
	}
	r.Header = c.headers.Clone()
	r.Header.Set("Content-Type", "application/x-protobuf")
	if c.compress {
		r.Header.Set("Content-Encoding", "gzip")
	}
	resp, err := c.http.Do(r)
	if failed := new(url.Error); errors.As(err, &failed) && failed.Temporary() {
		return retryPause, err
	} else if err != nil {
		return -1, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	switch {
	case err != nil:
		return -1, fmt.Errorf("reading the answer: %w", err)
	case resp.StatusCode/100 == 2 && resp.Header.Get("Content-Type") == "application/x-protobuf":
		return -1, partialSuccess(answer)
	case resp.StatusCode/100 == 2:
		return -1, nil
	}
	err = fmt.Errorf("the receiver answers %s: %s", resp.Status, bytes.TrimSpace(answer))
	switch resp.StatusCode {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return retryAfter(resp.Header.Get("Retry-After")), err
	}
	return -1, err
}

// retryAfter returns the pause that a receiver asks for, in seconds or as a date.
func retryAfter(text string) time.Duration {
	if seconds, err := strconv.ParseUint(text, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second
	}
	if at, err := http.ParseTime(text); err == nil {
		return max(0, time.Until(at))
	}
	return retryPause
}

// partialSuccess returns an error when the receiver rejected some spans. answer is an
// ExportTraceServiceResponse. Its field 1 is a message with the number of rejected spans in field 1
// and the reason in field 2.
func partialSuccess(answer []byte) error {
	refused, reason := uint64(0), ""
	err := fields(answer, func(number protowire.Number, value []byte, _ uint64) error {
		if number != 1 {
			return nil
		}
		return fields(value, func(number protowire.Number, value []byte, n uint64) error {
			switch number {
			case 1:
				refused = n
			case 2:
				reason = string(value)
			}
			return nil
		})
	})
	if err != nil {
		return fmt.Errorf("reading the answer: %w", err)
	}
	if refused != 0 || reason != "" {
		return fmt.Errorf("the receiver refuses %d spans: %s", refused, reason)
	}
	return nil
}

// fields calls f with each field of a message: value holds the bytes of a string or message, n a
// number.
func fields(message []byte, f func(number protowire.Number, value []byte, n uint64) error) error {
	for len(message) > 0 {
		number, kind, tag := protowire.ConsumeTag(message)
		if tag < 0 {
			return protowire.ParseError(tag)
		}
		length := protowire.ConsumeFieldValue(number, kind, message[tag:])
		if length < 0 {
			return protowire.ParseError(length)
		}
		field := message[tag : tag+length]
		value, n := []byte(nil), uint64(0)
		switch kind {
		case protowire.BytesType:
			value, _ = protowire.ConsumeBytes(field)
		case protowire.VarintType:
			n, _ = protowire.ConsumeVarint(field)
		}
		if err := f(number, value, n); err != nil {
			return err
		}
		message = message[tag+length:]
	}
	return nil
}
