package app

import (
	"context"
	"errors"
	"fmt"

	"github.com/latticekeep/latticekeep/internal/health"
	"github.com/latticekeep/latticekeep/internal/memory"
)

// memoryNeed returns how many bytes the deployment needs now.
func (d *deployment) memoryNeed() int64 {
	s := d.rows.State
	return memory.Deployment{Credentials: s.Rows("credential/"), Rows: s.Rows(""), Tenants: s.Rows("tenant/"), Objects: s.Rows("owned/")}.Need()
}

// checkMemory fails while the limit of memory is below what the deployment needs. Requests are served
// all the same: the need is that of much work at the same time.
func (d *deployment) checkMemory() health.Check {
	return health.Check{Name: "memory", Scope: health.Replica, Ask: func(context.Context) error {
		return memoryError(memory.Limit(), d.memoryNeed())
	}}
}

// errMemory is what to do when there is too little memory.
var errMemory = errors.New("raise the memory limit of the container, or MemoryMax= of the service: under load the kernel may end the server")

func memoryError(limit, need int64) error {
	if limit == 0 || limit >= need {
		return nil
	}
	return fmt.Errorf("the memory limit is %d MiB, and this deployment needs %d MiB: %w", limit>>20, (need+1<<20-1)>>20, errMemory)
}

// logMemory says at the start how much memory there is and how much the deployment needs.
func (s *service) logMemory() {
	limit, need := memory.Limit(), s.memoryNeed()
	s.logger.Info("memory", "limit_bytes", limit, "need_bytes", need)
	if err := memoryError(limit, need); err != nil {
		s.logger.Warn("there is too little memory", "error", err)
	}
}
