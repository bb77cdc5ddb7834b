package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
)

// apart keeps the client on the second half of the machine's cores until back is called. It returns
// the first half, which is for the server. Otherwise a client that sends more than the server can
// handle would take cores from it. In production the client is on another machine.
func apart() (first string, back func() error, err error) {
	if cores < 2 {
		return "", nil, errors.New("keeping the client apart from the server takes two cores")
	}
	half := cores / 2
	span := func(from, to int) string { return fmt.Sprintf("%d-%d", from, to-1) }
	if err := keepTo(span(half, cores)); err != nil {
		return "", nil, err
	}
	before := runtime.GOMAXPROCS(cores - half)
	return span(0, half), func() error {
		runtime.GOMAXPROCS(before)
		return keepTo(span(0, cores))
	}, nil
}

// keepTo restricts all threads of this process, and their future threads, to some cores.
func keepTo(these string) error {
	out, err := exec.Command("taskset", "--all-tasks", "--cpu-list", "--pid", these, strconv.Itoa(os.Getpid())).CombinedOutput()
	if err != nil {
		return fmt.Errorf("choosing the client's cores: %w: %s", err, out)
	}
	return nil
}
