package server

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"github.com/gin-gonic/gin"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/server/gate"
)

// observe names the request, sets the headers of every response, and when all
// is done logs and counts it.
func (s *Server) observe(c *gin.Context) {
	start := s.config.Now()
	id := authz.NewID("req")
	h := c.Writer.Header()
	h.Set(gate.RequestIDHeader, id)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store") // public answers replace it
	s.gate.ShowRate(c)                 // likewise
	defer func() {
		method, route, status := knownMethod(c.Request.Method), routeOf(c), c.Writer.Status()
		took := s.config.Now().Sub(start)
		s.metrics.observe(method, route, status, took)
		if last := c.Errors.Last(); last != nil && errors.Is(last, gate.ErrOverloaded) && !s.firstShed(start) {
			return
		}
		attrs := []slog.Attr{
			slog.String("request_id", id),
			slog.String("method", method),
			slog.String("route", route),
			slog.Int("status", status),
			slog.Duration("duration", took),
		}
		level := slog.LevelInfo
		if operational(route) {
			level = slog.LevelDebug
		}
		broken := c.Errors.ByType(gin.ErrorTypeRender) // an answer that was cut after its status
		if status >= http.StatusInternalServerError || len(broken) > 0 {
			level = slog.LevelError
			if err := c.Errors.Last(); err != nil {
				attrs = append(attrs, slog.String("error", err.Error()))
			}
		}
		s.config.Logger.LogAttrs(c.Request.Context(), level, "request", attrs...)
	}()
	c.Next()
}

// firstShed reports whether a request that was refused because too many waited is
// the first one of its second. The log tells of no other: there are as many as
// anybody sends, and to write them down would take what the server is short of.
func (s *Server) firstShed(at time.Time) bool {
	last, now := s.shed.Load(), at.Unix()
	return last != now && s.shed.CompareAndSwap(last, now)
}

// trace makes a span of the request, and a trace of the span: what a stranger says
// of its own trace is no more believed than what it says its request's id is. The
// request's id leads from the span to the log and the audit log.
func (s *Server) trace(c *gin.Context) {
	method, route := knownMethod(c.Request.Method), routeOf(c)
	if operational(route) {
		c.Next()
		return
	}
	ctx, span := s.config.Tracer.Start(c.Request.Context(), method+" "+route,
		trace.WithNewRoot(), trace.WithSpanKind(trace.SpanKindServer),
		trace.WithAttributes(attribute.String("http.request.method", method), attribute.String("http.route", route)))
	defer func() { // End as the deferred function itself would record what is panicked with
		status := c.Writer.Status()
		span.SetAttributes(attribute.Int("http.response.status_code", status),
			attribute.String("latticekeep.request_id", c.Writer.Header().Get(gate.RequestIDHeader)))
		if status >= http.StatusInternalServerError {
			span.SetStatus(codes.Error, "")
		}
		span.End()
	}()
	c.Request = c.Request.WithContext(ctx)
	c.Next()
}

// recover turns a panic into a 500. The value that was panicked with is not
// logged, since it may quote a secret; its type and the stack say enough.
func (s *Server) recover(c *gin.Context) {
	defer func() {
		v := recover()
		if v == nil {
			return
		}
		s.config.Logger.LogAttrs(c.Request.Context(), slog.LevelError, "panic",
			slog.String("request_id", c.Writer.Header().Get(gate.RequestIDHeader)),
			slog.String("route", routeOf(c)),
			slog.String("type", fmt.Sprintf("%T", v)),
			slog.String("stack", string(debug.Stack())))
		if c.Writer.Written() {
			// The response is broken: break the connection too, so that the
			// caller does not take it for whole.
			panic(http.ErrAbortHandler)
		}
		s.version(c).Refuse(c, fault.Internal)
	}()
	c.Next()
}

// refuse answers what reaches no endpoint.
func (s *Server) refuse(status int, message string) gin.HandlerFunc {
	return func(c *gin.Context) {
		s.version(c).Refuse(c, cmp.Or(s.gate.CountStranger(c), gate.Refusal(status, message)))
	}
}

// version returns the version whose envelopes a path gets.
func (s *Server) version(c *gin.Context) *gate.Version {
	if strings.HasPrefix(c.Request.URL.Path, "/v1/") {
		return s.v1
	}
	return s.v2
}

// routeOf returns the template that the request matched: a path may hold
// anything, and templates are few.
func routeOf(c *gin.Context) string {
	if route := c.FullPath(); route != "" {
		return route
	}
	return "none"
}

// knownMethod returns one of a few words for the method, which is the caller's
// to choose.
func knownMethod(method string) string {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions:
		return method
	}
	return "other"
}
