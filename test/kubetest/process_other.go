//go:build !linux

package kubetest

import "syscall"

// Outside Linux a child is ended by Stop alone.
func childAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{}
}
