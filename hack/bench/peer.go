package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
)

// peer is a running Vault or OpenBao that this product is compared with.
type peer struct {
	address string // host and port
	token   string
	engines map[string]string // type of each secrets engine, by the path where it was mounted
}

// newPeer takes the peer's URL and a file with a token that may mount engines.
func newPeer(address, tokenFile string) (*peer, error) {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "http" || u.Host == "" || strings.Trim(u.Path, "/") != "" {
		return nil, fmt.Errorf("-peer is %q: give http://HOST:PORT", address)
	}
	token, err := os.ReadFile(tokenFile)
	if err != nil {
		return nil, fmt.Errorf("-peer-token-file: %w", err)
	}
	return &peer{address: u.Host, token: strings.TrimSpace(string(token)), engines: map[string]string{"bench-transit": "transit", "bench-kv": "kv"}}, nil
}

// request returns a complete request. path has no /v1/.
func (p *peer) request(method, path string, body any) []byte {
	var encoded []byte
	if body != nil {
		var err error
		if encoded, err = json.Marshal(body); err != nil {
			panic("bench: encoding a request: " + err.Error())
		}
	}
	return requestWith(method, "/v1/"+path, "X-Vault-Token", p.token, encoded)
}

// send sends one request, whose answer has no body or one that is not needed.
func (p *peer) send(method, path string, body any) error {
	c, err := dial(p.address)
	if err != nil {
		return err
	}
	defer c.close()
	status, answer, err := c.do(p.request(method, path, body))
	if err == nil && status != http.StatusOK && status != http.StatusNoContent {
		err = fmt.Errorf("%s %s was answered %d: %s", method, path, status, answer)
	}
	return err
}

// begin mounts the engines, and makes the keys and the secret that the operations use.
func (p *peer) begin() error {
	for path, kind := range p.engines {
		if err := p.send(http.MethodPost, "sys/mounts/"+path, map[string]any{"type": kind}); err != nil {
			return err
		}
	}
	return errors.Join(
		p.send(http.MethodPost, "bench-transit/keys/encrypt", map[string]any{"type": "aes256-gcm96"}),
		p.send(http.MethodPost, "bench-transit/keys/sign", map[string]any{"type": "ed25519"}),
		p.send(http.MethodPost, "bench-kv/0", secret),
	)
}

// end removes the engines with all that is in them.
func (p *peer) end() (err error) {
	for path := range p.engines {
		err = errors.Join(err, p.send(http.MethodDelete, "sys/mounts/"+path, nil))
	}
	return err
}

var secret = map[string]any{"password": payload}

// operations are those with the names of our own. Secrets are stored under poolSize names.
func (p *peer) operations() map[string]operation {
	text := base64.StdEncoding.EncodeToString([]byte(payload))
	of := func(status int, method, path string, body any) operation {
		b := p.request(method, path, body)
		return operation{status: status, next: func() []byte { return b }}
	}
	return map[string]operation{
		"encrypt": of(http.StatusOK, http.MethodPost, "bench-transit/encrypt/encrypt", map[string]any{"plaintext": text}),
		"sign":    of(http.StatusOK, http.MethodPost, "bench-transit/sign/sign", map[string]any{"input": text}),
		"seal": {status: http.StatusNoContent, next: func() []byte {
			return p.request(http.MethodPost, fmt.Sprint("bench-kv/", rand.IntN(poolSize)), secret)
		}},
		"unseal": of(http.StatusOK, http.MethodGet, "bench-kv/0", nil),
	}
}

// partPeer drives this product and the peer in turns, with the load's connections and with one.
func partPeer(r *run, ctx context.Context) (err error) { //nolint:revive // it stands in a table of methods of run
	if r.peer == nil {
		r.note("There is no peer: give -peer and -peer-token-file.")
		return nil
	}
	if err := r.peer.begin(); err != nil {
		return errors.Join(err, r.peer.end())
	}
	defer func() { err = errors.Join(err, r.peer.end()) }()
	theirs := &deployment{settings: settings{name: "peer"}, replicas: []*server{{address: r.peer.address}}}
	deployments := []*deployment{theirs}
	defer func() {
		for _, d := range deployments[1:] {
			err = errors.Join(err, d.stop())
		}
	}()
	all := map[*deployment]map[string]operation{theirs: r.peer.operations()}
	for _, signing := range r.signing {
		d, err := start(ctx, r.binary, r.dir, settings{name: "beside-" + signing, signing: signing})
		deployments = append(deployments, d)
		if err != nil {
			return err
		}
		operations, err := d.operations(ctx)
		if err != nil {
			return err
		}
		all[d] = make(map[string]operation)
		for _, o := range operations {
			all[d][o.name] = o
		}
	}
	for _, connections := range []int{r.load.connections, 1} {
		if err := compare(ctx, r, load{connections: connections, warm: r.load.warm, length: r.load.length}, deployments, all); err != nil {
			return err
		}
	}
	return nil
}

// compare prints how many requests the others answer for each one of the first deployment.
func compare(ctx context.Context, r *run, l load, deployments []*deployment, all map[*deployment]map[string]operation) error {
	fmt.Fprintf(r.out, "\n### %d connections\n\n", l.connections)
	rows := [][]string{{"operation", "", "requests/s", "times the peer's", "p50 ms", "p99 ms", "p99 ÷ the peer's"}}
	for _, name := range operationNames {
		if _, has := all[deployments[0]][name]; !has || !slices.Contains(r.only, name) {
			continue
		}
		measured := make([]series, len(deployments))
		for n := range r.roundCount {
			for i, d := range deployments {
				sample, err := l.run(ctx, d, all[d][name])
				if err != nil {
					return fmt.Errorf("driving %s of %s: %w", name, d.name, err)
				}
				measured[i].add(sample, costs{}, costs{})
				r.progress("round %d of %d: %s of %s: %.0f/s", n+1, r.roundCount, name, d.name, sample.rate())
			}
		}
		for i, d := range deployments {
			m, first := measured[i], measured[0]
			rows = append(rows, []string{name, d.name, m.rate.show("%.0f"), m.rate.over(first.rate).show("%.2f"), m.median.show("%.2f"), m.p99.show("%.1f"), m.p99.over(first.p99).show("%.2f")})
		}
	}
	r.print(rows)
	return nil
}
