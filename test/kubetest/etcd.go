package kubetest

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// GetFromEtcd returns what etcd stores under a key, without the API server. It fails if there is
// nothing.
func (c *ControlPlane) GetFromEtcd(ctx context.Context, key string) ([]byte, error) {
	var answer struct {
		Kvs []struct {
			Value []byte `json:"value"`
		} `json:"kvs"`
	}
	if err := c.callEtcd(ctx, "range", map[string][]byte{"key": []byte(key)}, &answer); err != nil {
		return nil, err
	}
	if len(answer.Kvs) != 1 {
		return nil, fmt.Errorf("etcd has no key %s", key)
	}
	return answer.Kvs[0].Value, nil
}

// PutIntoEtcd stores value under a key, without the API server.
func (c *ControlPlane) PutIntoEtcd(ctx context.Context, key string, value []byte) error {
	return c.callEtcd(ctx, "put", map[string][]byte{"key": []byte(key), "value": value}, new(struct{}))
}

// DeleteFromEtcd removes a key, without the API server.
func (c *ControlPlane) DeleteFromEtcd(ctx context.Context, key string) error {
	return c.callEtcd(ctx, "deleterange", map[string][]byte{"key": []byte(key)}, new(struct{}))
}

// callEtcd makes a call of etcd's JSON gateway, in which []byte is base64.
func (c *ControlPlane) callEtcd(ctx context.Context, call string, request, answer any) error {
	body, err := json.Marshal(request)
	if err != nil {
		return fmt.Errorf("calling etcd: %w", err)
	}
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", c.path("etcd.sock"))
	}}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: 10 * time.Second}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://etcd/v3/kv/"+call, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("calling etcd: %w", err)
	}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("calling etcd: %w", err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 8<<20))
	if err != nil {
		return fmt.Errorf("calling etcd: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("calling etcd: %s: %.200s", resp.Status, text)
	}
	return json.Unmarshal(text, answer)
}

// ServeEtcd serves etcd, which has a socket only, with TLS on loopback until ctx ends, and returns its URL.
func (c *ControlPlane) ServeEtcd(ctx context.Context, config *tls.Config) (string, error) {
	config.NextProtos = []string{"h2"} // gRPC wants it to be agreed on
	l, err := tls.Listen("tcp", "127.0.0.1:0", config)
	if err != nil {
		return "", fmt.Errorf("serving etcd: %w", err)
	}
	context.AfterFunc(ctx, func() { _ = l.Close() })
	go func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return // closed
			}
			go c.forwardToEtcd(ctx, client)
		}
	}()
	return "https://" + l.Addr().String(), nil
}

// forwardToEtcd carries bytes between a client and etcd until one of them ends.
func (c *ControlPlane) forwardToEtcd(ctx context.Context, client net.Conn) {
	server, err := new(net.Dialer).DialContext(ctx, "unix", c.path("etcd.sock"))
	if err != nil {
		_ = client.Close()
		return
	}
	end := func() { _ = client.Close(); _ = server.Close() }
	stop := context.AfterFunc(ctx, end)
	defer stop()
	go func() {
		_, _ = io.Copy(server, client)
		end()
	}()
	_, _ = io.Copy(client, server)
	end()
}
