// Command bench is `make bench`: it starts the built binary as a production server, sends load over
// loopback, and prints the results as Markdown tables for docs/benchmarks.md.
//
// Absolute times on a shared machine mean little, so each operation is compared with its limit: the
// number of cores divided by the cost of its cryptography, measured in the same run. The client
// runs on the same cores. The tables show its share but do not deduct it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// parts are the measurements, in this order.
var parts = []struct {
	name, what string
	do         func(*run, context.Context) error
}{
	{"embedded", "Every operation on the embedded store, with entries signed one by one and in batches", (*run).partEmbedded},
	{"postgres", "One to four replicas on one PostgreSQL", (*run).partPostgres},
	{"growth", "Many credentials", (*run).partGrowth},
	{"kms", "Keys under a key-management service", (*run).partKMS},
	{"overload", "More than the server can do", (*run).partOverload},
	{"logins", "Log-ins beside", (*run).partLogins},
	{"peer", "A Vault or OpenBao that runs beside", partPeer},
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := command(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func command(ctx context.Context) (err error) {
	var names, known []string
	for _, p := range parts {
		known = append(known, p.name)
	}
	r := &run{out: os.Stdout, least: make(map[string]float64)}
	flag.StringVar(&r.binary, "latticekeep", "bin/latticekeep", "`path` of the product")
	flag.StringVar(&r.dir, "dir", "", "`folder` on the disk to be measured; default a temporary one")
	flag.IntVar(&r.roundCount, "rounds", 5, "how often everything is measured")
	flag.IntVar(&r.load.connections, "connections", 64, "of the client")
	flag.DurationVar(&r.load.warm, "warm", 500*time.Millisecond, "up of an operation in a round, not measured")
	flag.DurationVar(&r.load.length, "time", 2*time.Second, "that an operation is measured in a round")
	flag.IntVar(&r.credentials, "credentials", 50_000, "of the large store in the part growth")
	flag.IntVar(&r.kmsOperations, "kms-operations", 200_000, "at least, in the part kms")
	flag.Func("least", "`share` of its primitives in the server's processor time of an operation, as encrypt=0.4, below which the program fails; again for others", func(s string) error {
		name, text, _ := strings.Cut(s, "=")
		share, err := strconv.ParseFloat(text, 64)
		if err != nil || !slices.Contains(operationNames, name) {
			return errors.New("give an operation and a number, as encrypt=0.4")
		}
		r.least[name] = share
		return nil
	})
	address := flag.String("peer", "", "`URL` of a Vault or OpenBao for the part peer, as http://127.0.0.1:8200; it gets two engines with names that begin with bench-, and loses them at the end")
	token := flag.String("peer-token-file", "", "`file` with a token of the peer that may mount engines")
	flag.BoolVar(&r.syncs, "syncs", true, "count them, in a run of its own under strace")
	flag.StringVar(&r.load.profiles, "profiles", "", "`folder` for the processor profile of each operation of the part embedded, in its last round; the measurement is then off by what profiling costs")
	list(&r.signing, "signing", "of audit entries", "entry", "batch")
	list(&r.only, "operation", "to drive", operationNames...)
	list(&names, "part", "what to measure", known...)
	flag.Parse() //nolint:revive // main only calls this and reports
	if r.roundCount < 1 || r.load.connections < 1 || r.credentials <= poolSize {
		return fmt.Errorf("rounds and connections are at least 1, credentials more than %d", poolSize)
	}
	if *address != "" {
		if r.peer, err = newPeer(*address, *token); err != nil {
			return err
		}
	}
	if r.load.profiles != "" {
		if err := os.MkdirAll(r.load.profiles, 0o755); err != nil {
			return err
		}
	}
	if r.dir, err = os.MkdirTemp(r.dir, "latticekeep-bench-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.dir)) }()
	if r.dir, err = filepath.Abs(r.dir); err != nil {
		return err
	}
	if r.bench, err = newBench(); err != nil {
		return fmt.Errorf("preparing the primitives: %w", err)
	}
	fmt.Fprintf(r.out, "%s, %s, `%s`\n", time.Now().Format("2 January 2006"), machine(), strings.Join(append([]string{"bench"}, os.Args[1:]...), " "))
	for _, p := range parts {
		if !slices.Contains(names, p.name) {
			continue
		}
		fmt.Fprintf(r.out, "\n## %s\n\n", p.what)
		if err := p.do(r, ctx); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

// list defines a flag that takes some of the words, separated by commas. The default is all words.
func list(to *[]string, name, usage string, words ...string) {
	*to = words
	flag.Func(name, usage+": one or several of "+strings.Join(words, ", ")+" with commas; default all", func(s string) error {
		*to = strings.Split(s, ",")
		for _, word := range *to {
			if !slices.Contains(words, word) {
				return fmt.Errorf("%q is none of them", word)
			}
		}
		return nil
	})
}
