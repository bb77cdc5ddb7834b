// Command registrar registers a CSI driver with the kubelet of this node, as the node-driver-registrar does.
//
// Usage: registrar REGISTRATION-SOCKET DRIVER-NAME DRIVER-SOCKET
package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"

	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

type server struct{ info *registration.PluginInfo }

// GetInfo implements the kubelet's interface.
func (s server) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return s.info, nil
}

// NotifyRegistrationStatus implements the kubelet's interface.
func (s server) NotifyRegistrationStatus(_ context.Context, r *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	fmt.Printf("registered: %v %s\n", r.GetPluginRegistered(), r.GetError())
	return &registration.RegistrationStatusResponse{}, nil
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "registrar:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 3 {
		return fmt.Errorf("usage: registrar REGISTRATION-SOCKET DRIVER-NAME DRIVER-SOCKET")
	}
	if err := os.Remove(args[0]); err != nil && !errors.Is(err, fs.ErrNotExist) { // a killed registrar left it
		return err
	}
	l, err := net.Listen("unix", args[0])
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	registration.RegisterRegistrationServer(s, server{&registration.PluginInfo{
		Type: registration.CSIPlugin, Name: args[1], Endpoint: args[2], SupportedVersions: []string{"1.0.0"},
	}})
	return s.Serve(l)
}
