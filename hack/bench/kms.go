package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/latticekeep/latticekeep/test/kmstest"
)

// Properties of the key-management service in partKMS.
const (
	kmsLatency   = 20 * time.Millisecond
	kmsThrottled = 0.3 // share of calls
)

// partKMS compares encryption with a slow key-management service to encryption with a key file.
func (r *run) partKMS(ctx context.Context) (err error) {
	service, err := kmstest.NewVault()
	if err != nil {
		return fmt.Errorf("starting a key-management service: %w", err)
	}
	defer service.Close()
	local, err := start(ctx, r.binary, r.dir, settings{name: "key-file", signing: "entry"})
	defer func() { err = errors.Join(err, local.stop()) }()
	if err != nil {
		return err
	}
	remote, err := start(ctx, r.binary, r.dir, settings{name: "hashivault", signing: "entry", kms: service.URL(), token: service.Token()})
	defer func() { err = errors.Join(err, remote.stop()) }()
	if err != nil {
		return err
	}
	service.SetLatency(kmsLatency)
	service.SetThrottle(kmsThrottled)
	service.ResetCalls()
	rates := make(map[*deployment]values)
	done := 0
	operations := make(map[*deployment]operation)
	for _, d := range []*deployment{local, remote} {
		all, err := d.operations(ctx)
		if err != nil {
			return err
		}
		operations[d] = all[0]
	}
	for done < r.kmsOperations {
		for _, d := range []*deployment{local, remote} {
			sample, err := r.load.run(ctx, d, operations[d])
			if err != nil {
				return err
			}
			rates[d] = append(rates[d], sample.rate())
			if d == remote {
				done += sample.requests
			}
			r.progress("encrypt with %s: %.0f/s, %d in all", d.name, sample.rate(), done)
		}
	}
	r.print([][]string{
		{"encrypt", "requests/s", "of the key file's, round by round", "requests", "calls of the KMS"},
		{"key file", rates[local].show("%.0f"), "", "", ""},
		{fmt.Sprintf("KMS of %s that throttles %.0f %%", kmsLatency, kmsThrottled*100), rates[remote].show("%.0f"), rates[remote].over(rates[local]).show("%.2f"),
			fmt.Sprint(done), fmt.Sprint(service.Calls())},
	})
	return nil
}
