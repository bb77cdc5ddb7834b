package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
)

// payload is the text to encrypt, sign or seal: 1 KiB.
var payload = strings.Repeat("correct horse battery staple 42 ", 32)

const (
	poolSize = 1000 // credentials, envelopes and signatures that reads choose from
	pageSize = 20   // entries on a page of a list
)

// An operation is an API request that is sent repeatedly.
type operation struct {
	name   string
	status int
	costs  []primitive // minimum cryptography
	next   func() []byte
}

var operationNames = []string{"encrypt", "decrypt", "sign", "verify", "seal", "unseal", "list"}

// operations creates the operations for a deployment, with the data that they read.
func (d *deployment) operations(ctx context.Context) ([]operation, error) {
	body := func(v any) []byte {
		b, err := json.Marshal(v)
		if err != nil {
			panic("bench: encoding a request: " + err.Error())
		}
		return b
	}
	always := func(b []byte) func() []byte { return func() []byte { return b } }
	oneOf := func(all [][]byte) func() []byte { return func() []byte { return all[rand.IntN(len(all))] } }
	data := body(map[string]string{"data": payload})
	encrypt := request(http.MethodPost, "/api/v2/encryption/encrypt", d.key, data)
	sign := request(http.MethodPost, "/api/v2/encryption/sign", d.key, data)
	seal := request(http.MethodPost, "/api/v2/vault/seal", d.key, body(map[string]any{
		"name": "payments-database", "credential_type": "database", "values": map[string]string{"password": payload},
	}))

	var decrypts, verifies, unseals, lists [][]byte
	err := errors.Join(
		d.collect(ctx, encrypt, http.StatusOK, func(answer []byte) error {
			decrypts = append(decrypts, request(http.MethodPost, "/api/v2/encryption/decrypt", d.key, answer))
			return nil
		}),
		d.collect(ctx, sign, http.StatusOK, func(answer []byte) error {
			var signed map[string]any
			if err := json.Unmarshal(answer, &signed); err != nil {
				return err
			}
			signed["data"] = payload
			verifies = append(verifies, request(http.MethodPost, "/api/v2/encryption/verify", d.key, body(signed)))
			return nil
		}),
		d.collect(ctx, seal, http.StatusCreated, func(answer []byte) error {
			id, err := credentialID(answer)
			unseals = append(unseals, request(http.MethodGet, "/api/v2/vault/"+id, d.key, nil))
			return err
		}),
	)
	if err == nil {
		lists, err = d.pages()
	}
	all := []operation{
		{"encrypt", http.StatusOK, []primitive{sealMessage, dualSign, entrySign}, always(encrypt)},
		{"decrypt", http.StatusOK, []primitive{dualVerify, openMessage, entrySign}, oneOf(decrypts)},
		{"sign", http.StatusOK, []primitive{dataSign, entrySign}, always(sign)},
		{"verify", http.StatusOK, []primitive{dataVerify, entrySign}, oneOf(verifies)},
		{"seal", http.StatusCreated, []primitive{sealCredential, dualSign, entrySign}, always(seal)},
		{"unseal", http.StatusOK, []primitive{dualVerify, openCredential, entrySign}, oneOf(unseals)},
		{"list", http.StatusOK, []primitive{entrySign}, oneOf(lists)},
	}
	for i := range all {
		if d.signing == "batch" { // one signature covers many entries
			all[i].costs = slices.DeleteFunc(all[i].costs, func(p primitive) bool { return p == entrySign })
		}
	}
	return all, err
}

// pages returns a request for each page of the credentials, up to poolSize of them.
func (d *deployment) pages() (requests [][]byte, err error) {
	c, err := dial(d.replicas[0].address)
	if err != nil {
		return nil, err
	}
	defer c.close()
	for cursor := ""; len(requests) < poolSize; {
		path := fmt.Sprintf("/api/v2/vault/list?limit=%d", pageSize)
		if cursor != "" {
			path += "&cursor=" + url.QueryEscape(cursor)
		}
		page := request(http.MethodGet, path, d.key, nil)
		status, answer, err := c.do(page)
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("a page of the list was answered %d: %s", status, answer)
		}
		if err != nil {
			return nil, err
		}
		var found struct {
			Next string `json:"next_cursor"`
		}
		if err := json.Unmarshal(answer, &found); err != nil {
			return nil, err
		}
		requests = append(requests, page)
		if cursor = found.Next; cursor == "" {
			break
		}
	}
	return requests, nil
}

func credentialID(answer []byte) (string, error) {
	var sealed struct {
		ID string `json:"credential_id"`
	}
	err := json.Unmarshal(answer, &sealed)
	return sealed.ID, err
}

// collect sends a request poolSize times and passes each answer to take.
func (d *deployment) collect(ctx context.Context, request []byte, want int, take func(answer []byte) error) error {
	var mu sync.Mutex
	var failed error
	var wg sync.WaitGroup
	left := poolSize
	for range 16 {
		wg.Go(func() {
			c, err := dial(d.replicas[0].address)
			if err != nil {
				mu.Lock()
				defer mu.Unlock()
				failed = err
				return
			}
			defer c.close()
			for {
				mu.Lock()
				left--
				done := left < 0 || failed != nil || ctx.Err() != nil
				mu.Unlock()
				if done {
					return
				}
				status, answer, err := c.do(request)
				for again := 0; err == nil && status == http.StatusServiceUnavailable && again < 10; again++ { // the disk may be shared
					status, answer, err = c.do(request)
				}
				if err == nil && status != want {
					err = fmt.Errorf("answered %d: %s", status, answer)
				}
				mu.Lock()
				if err == nil {
					err = take(answer)
				}
				if err != nil {
					failed = err
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return errors.Join(failed, ctx.Err())
}
