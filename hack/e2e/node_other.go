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

// startNode always fails here: a node needs Linux.
func startNode(context.Context, string, string, []string) (string, func() string, error) {
	return "", nil, errors.New("a node needs Linux")
}
