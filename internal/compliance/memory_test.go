package compliance_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/memory"
	"github.com/latticekeep/latticekeep/test/machine"
	"github.com/latticekeep/latticekeep/test/story"
)

// The most that a credential takes is its part in the newest evidence while that is stored.
func TestACredentialTakesTheMemoryThatTheFormulaSays(t *testing.T) {
	const credentials = 5000
	took := machine.Heap(func() (all struct {
		*compliance.Evidence
		encoded []byte
	}) {
		all.Evidence = compliance.NewEvidence()
		for i := range credentials {
			check(t, all.Add(story.EntryOf(audit.Event{
				Type: audit.CredentialSealed, Outcome: audit.Success, Principal: story.Owner,
				Resource:   audit.Resource{ID: fmt.Sprintf("cred_%026d", i), Type: audit.CredentialResource},
				Attributes: map[string]string{audit.AttributeVersion: "1", "expires_at": story.Start.Add(time.Hour).Format(time.RFC3339)},
			}, story.Start, uint64(i)+1)))
		}
		var err error
		all.encoded, err = all.Encode()
		check(t, err)
		return all
	})
	machine.CheckHeap(t, credentials, took, memory.Deployment{Credentials: credentials}.Need()-memory.Deployment{}.Need())
}
