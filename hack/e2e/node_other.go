//go:build !linux

package main

import (
	"context"
	"errors"
	"runtime"
)

const insideNode = "LATTICEKEEP_E2E_NODE"

func onOwnNode(context.Context, ...string) error {
	return errors.New("a node needs Linux, not " + runtime.GOOS + ": set E2E_KUBECONFIG to the kubeconfig of a cluster that may be changed")
}

// node has no instance here: a node needs Linux.
type node struct{ csi string }

func startNode(context.Context, string, string, []string) (*node, error) {
	return nil, errors.New("a node needs Linux")
}

func (*node) kubeconfig(string) string { return "" }

func (*node) etcdSocket() string { return "" }

func (*node) logTails() string { return "" }

func (*node) startAPIServer(context.Context, ...string) error { return nil }

func (*node) stopAPIServer() error { return nil }

func (*node) startCSI(context.Context, string) error { return nil }

func (*node) restartKubelet() error { return nil }

func (*node) restart(context.Context) error { return nil }
