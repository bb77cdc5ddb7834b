//go:build !linux

package kubetest

import "syscall"

// Outside Linux only Stop ends a child.
func childAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{}
}
