package vault

import (
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/vault/record"
)

// errDenied is the only answer for a credential that does not exist for the caller. It is the same
// for every reason.
var errDenied = fault.New(fault.Forbidden, "access denied")

// ErrCondition refuses a change whose [Condition] does not hold. Only a caller that may unseal the
// credential gets it.
var ErrCondition = fault.New(fault.Conflict, "the credential is not the version that If-Match names, or If-None-Match found one: read it again, and repeat the change on what it is now")

// ErrTaken refuses a name that another credential has. Only a caller that may unseal the other one gets
// it; anybody else makes a second credential of the name, as [Vault.Seal] does.
var ErrTaken = fault.New(fault.Conflict, "another credential has this name: choose another, or move that one away first")

// reasonCondition is the reason in the entry of a change whose condition does not hold.
const reasonCondition = "condition_failed"

// reasonTaken is the reason in the entry of a rename that [ErrTaken] refuses.
const reasonTaken = "name_taken"

// Condition is the value of If-Match.
type Condition = record.Condition

// mayRead reports whether p could unseal a credential that exists for it.
func mayRead(p authz.Principal) bool { return p.May(authz.UnsealCredential) }

// mayReadAt reports the same of a credential with a name.
func mayReadAt(p authz.Principal, name string) bool {
	return mayRead(p) && p.Reaches(authz.UnsealCredential, name)
}

// failCondition makes e the entry of a change whose condition does not hold, and returns the answer.
// Without the right to unseal the credential, that is the answer for a credential that is not there.
// readable says that p could unseal the credential itself.
func failCondition(readable bool, e *audit.Event) error {
	e.Outcome, e.Attributes = audit.Denied, map[string]string{audit.AttributeReason: reasonCondition}
	if readable {
		return ErrCondition
	}
	return errDenied
}
