//go:build !linux

package node

import (
	"context"
	"errors"
	"runtime"
)

// Run fails: a node needs Linux.
func Run(context.Context, ...string) error {
	return errors.New("a node needs Linux, not " + runtime.GOOS + ": set E2E_KUBECONFIG to the kubeconfig of a cluster that may be changed")
}

// A Node has no instance here.
type Node struct{ Config }

// Start fails, as [Run] does.
func Start(context.Context, Config) (*Node, error) { return nil, errors.New("a node needs Linux") }

func (*Node) Kubeconfig(string) string { return "" }

func (*Node) EtcdSocket() string { return "" }

func (*Node) LogTails() string { return "" }

func (*Node) StartAPIServer(context.Context, ...string) error { return nil }

func (*Node) StopAPIServer() error { return nil }

func (*Node) StartCSI(context.Context, string) error { return nil }

func (*Node) RestartKubelet() error { return nil }

func (*Node) Restart(context.Context) error { return nil }
