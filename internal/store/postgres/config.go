package postgres

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// These constants bound what a session may take. A replica that stops, or loses its network, while
// it holds the lock on the head keeps the lock for idleLimit; the others wait for it for lockLimit.
// On the client side a read fails after readWait and a step of a commit after commitWait. Both are
// longer than the server needs to report that it gave up. A copy is bounded, because PostgreSQL
// keeps the rows that are deleted meanwhile.
const (
	viewLimit   = 2 * time.Second // how long a View may read
	copyLimit   = time.Hour
	connectWait = 2 * time.Second
	idleLimit   = time.Second
	lockLimit   = 4 * time.Second
	readWait    = 2500 * time.Millisecond
	commitWait  = 5 * time.Second
)

// application is the name of this product's sessions in pg_stat_activity. A writer that has waited
// for lockLimit ends sessions with this name that have held the lock for too long. After the slash
// is the newest format of a store that the program reads. Releases that read format 1 only may have
// the name without it.
const application = "latticekeep"

// applicationName returns the name of the sessions of a program that reads a format.
func applicationName(reads int) string { return fmt.Sprintf("%s/%d", application, reads) }

// readsOf returns the format that the program with sessions of this name reads. ok is false for a
// name that is not of this product.
func readsOf(name string) (reads int, ok bool) {
	text, slash := strings.CutPrefix(name, application+"/")
	if reads, err := strconv.Atoi(text); slash && err == nil {
		return reads, true
	}
	return 1, slash || name == application
}

// purpose is what a session is for.
type purpose int

const (
	writing purpose = iota // the groups of this process
	reading                // Views and rehearsals
	tending                // copies, migrations and VACUUM, which may be slow
)

// parameters returns the settings of a session. The statements are few and simple; each has one
// right plan, and the server keeps it.
func (p purpose) parameters(name string) map[string]string {
	ms := func(d time.Duration) string { return fmt.Sprint(d.Milliseconds()) }
	set := map[string]string{
		"application_name":               name,
		"plan_cache_mode":                "force_generic_plan",
		"enable_seqscan":                 "off",
		"jit":                            "off",
		"client_min_messages":            "warning",
		"default_transaction_deferrable": "off",
		"tcp_keepalives_idle":            "5",
		"tcp_keepalives_interval":        "2",
		"tcp_keepalives_count":           "3",
	}
	switch p {
	case writing:
		set["idle_in_transaction_session_timeout"] = ms(idleLimit)
		set["lock_timeout"] = ms(lockLimit)
		set["statement_timeout"] = ms(lockLimit + time.Second/2)
	case reading:
		set["idle_in_transaction_session_timeout"] = ms(2 * viewLimit)
		set["statement_timeout"] = ms(viewLimit)
	case tending:
		set["idle_in_transaction_session_timeout"] = ms(copyLimit)
		set["statement_timeout"] = "0"
		set["lock_timeout"] = "0"
	}
	return set
}
