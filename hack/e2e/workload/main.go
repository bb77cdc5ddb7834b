// Command workload runs in the pods of `make e2e` beside the product: as a consumer of a target
// Secret, a consumer of the REST API, a load, and the container that holds a pod's sandbox. It
// prints digests and never a value.
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

const usage = `usage: workload pause
       workload file FOLDER
       workload follow FOLDER
       workload rest URL CA-FILE TOKEN-FILE NAME
       workload load URL CA-FILE TOKEN-FILE`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var err error
	switch args := os.Args[1:]; {
	case len(args) == 1 && args[0] == "pause":
		<-ctx.Done()
	case len(args) == 2 && args[0] == "file":
		err = readFiles(args[1])
	case len(args) == 2 && args[0] == "follow":
		err = follow(ctx, args[1])
	case len(args) == 5 && args[0] == "rest":
		var c *client
		if c, err = newClient(args[1], args[2], args[3]); err == nil {
			err = c.readByName(ctx, args[4])
		}
	case len(args) == 4 && args[0] == "load":
		var c *client
		if c, err = newClient(args[1], args[2], args[3]); err == nil {
			err = c.load(ctx)
		}
	default:
		err = errors.New(usage)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// digests returns digests of the values, which prove that the values were read.
func digests(values map[string]string) string {
	var text strings.Builder
	for _, key := range slices.Sorted(maps.Keys(values)) {
		fmt.Fprintf(&text, "%s: %d bytes, SHA-256 %x\n", key, len(values[key]), sha256.Sum256([]byte(values[key])))
	}
	return text.String()
}

func show(values map[string]string) { fmt.Print(digests(values)) }

// follow prints the digests of the files in a folder, and prints them again whenever they are others.
func follow(ctx context.Context, folder string) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for last := ""; ; {
		values, err := filesIn(folder)
		if err != nil {
			return err
		}
		if now := digests(values); now != last {
			last = now
			fmt.Print(now)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// readFiles reads a mounted Secret. Each key is a file; kubelet's own files are hidden.
func readFiles(folder string) error {
	values, err := filesIn(folder)
	if err == nil {
		show(values)
	}
	return err
}

func filesIn(folder string) (map[string]string, error) {
	paths, err := filepath.Glob(filepath.Join(folder, "[^.]*"))
	if err != nil {
		return nil, err
	}
	values := make(map[string]string)
	for _, path := range paths {
		value, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("reading a key: %w", err)
		}
		values[filepath.Base(path)] = string(value)
	}
	if len(values) == 0 {
		return nil, fmt.Errorf("%s is empty", folder)
	}
	return values, nil
}

// A client calls the service with the projected token of the pod's ServiceAccount.
type client struct {
	url, tokenFile string
	http           *http.Client
}

func newClient(url, caFile, tokenFile string) (*client, error) {
	ca, err := os.ReadFile(caFile)
	if err != nil {
		return nil, fmt.Errorf("reading the certificate authority: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, fmt.Errorf("%s has no certificate", caFile)
	}
	config := &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13}
	// Each call has its own connection. A kept one would stay bound to a pod that is gone.
	transport := &http.Transport{TLSClientConfig: config, DisableKeepAlives: true}
	return &client{url: url, tokenFile: tokenFile, http: &http.Client{Transport: transport, Timeout: 10 * time.Second}}, nil
}

// A refusal is an answer without a success status.
type refusal struct{ status int }

func (r refusal) Error() string { return fmt.Sprintf("answered %d", r.status) }

func (c *client) call(ctx context.Context, method, path string, header http.Header, in, out any) (*tls.ConnectionState, error) {
	var body io.Reader = http.NoBody
	if in != nil {
		encoded, err := json.Marshal(in)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(encoded)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.url+path, body)
	if err != nil {
		return nil, err
	}
	maps.Copy(req.Header, header)
	token, err := os.ReadFile(c.tokenFile) // kubelet renews it
	if err != nil {
		return nil, fmt.Errorf("reading the token: %w", err)
	}
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode/100 != 2 {
		return nil, refusal{resp.StatusCode}
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return nil, fmt.Errorf("decoding the answer: %w", err)
	}
	return resp.TLS, nil
}

type unsealed struct {
	Values map[string]string `json:"values"`
}

func (c *client) readByName(ctx context.Context, name string) error {
	var answer unsealed
	state, err := c.call(ctx, http.MethodGet, "/api/v2/vault/by-name/"+name, nil, nil, &answer)
	if err != nil {
		return fmt.Errorf("reading %s: %w", name, err)
	}
	fmt.Printf("%s, %s\n", tls.VersionName(state.Version), state.CurveID)
	show(answer.Values)
	return nil
}

const (
	pace       = 20 * time.Millisecond // between calls: about fifty per second, below the limit of a tenant
	before     = 20                    // writes before the load reports that it runs
	after      = 20                    // writes after the outage
	outageEnds = 5 * time.Minute       // latest end of the outage
)

// load writes and reads until the service was away and is back, then reads every credential that
// was acknowledged. It repeats an unacknowledged write under its Idempotency-Key until it succeeds.
// No write may happen twice.
func (c *client) load(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, outageEnds)
	defer cancel()
	ids := make(map[string]string) // acknowledged credentials, name to id
	var names []string             // names in the order of their writes
	missed, since := 0, 0          // failed calls; writes since the last failure
	ticker := time.NewTicker(pace)
	defer ticker.Stop()
	for missed == 0 || since < after {
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return fmt.Errorf("the service was not away and back in time: %d writes acknowledged, %d calls failed", len(ids), missed)
		}
		name := fmt.Sprintf("load-%d", len(ids))
		id, err := c.seal(ctx, name)
		if err == nil {
			ids[name], names, since = id, append(names, name), since+1
			if len(ids) == before {
				fmt.Println("under load")
			}
			err = c.check(ctx, names[len(names)/2], ids)
		}
		if err == nil {
			continue
		}
		if len(ids) == 0 {
			return fmt.Errorf("writing: %w", err)
		}
		since = 0
		if missed++; missed == 1 {
			fmt.Println("the service is away")
		}
	}
	fmt.Println("the service is back")
	return c.account(ctx, ids)
}

// account compares the stored credentials with the acknowledged ones.
func (c *client) account(ctx context.Context, ids map[string]string) error {
	for name := range ids {
		if err := c.check(ctx, name, ids); err != nil {
			return fmt.Errorf("an acknowledged write is lost: %s: %w", name, err)
		}
	}
	var list struct {
		Credentials []struct {
			ID   string `json:"credential_id"`
			Name string `json:"name"`
		} `json:"credentials"`
	}
	if _, err := c.call(ctx, http.MethodGet, "/api/v2/vault/list", nil, nil, &list); err != nil {
		return fmt.Errorf("listing: %w", err)
	}
	stored := 0
	for _, credential := range list.Credentials {
		if !strings.HasPrefix(credential.Name, "load-") {
			continue
		}
		stored++
		if ids[credential.Name] != credential.ID {
			return fmt.Errorf("%s is stored twice", credential.Name)
		}
	}
	if stored != len(ids) {
		return fmt.Errorf("%d writes were acknowledged and %d are stored", len(ids), stored)
	}
	fmt.Println("every acknowledged write is stored, once, and reads back")
	return nil
}

func (c *client) seal(ctx context.Context, name string) (string, error) {
	var answer struct {
		ID string `json:"credential_id"`
	}
	_, err := c.call(ctx, http.MethodPost, "/api/v2/vault/seal", http.Header{"Idempotency-Key": {name}},
		map[string]any{"name": name, "credential_type": "load", "values": map[string]string{"of": name}}, &answer)
	return answer.ID, err
}

// check reads a credential back.
func (c *client) check(ctx context.Context, name string, ids map[string]string) error {
	var answer unsealed
	if _, err := c.call(ctx, http.MethodGet, "/api/v2/vault/"+ids[name], nil, nil, &answer); err != nil {
		return err
	}
	if !maps.Equal(answer.Values, map[string]string{"of": name}) {
		return errors.New("other values than were written")
	}
	return nil
}
