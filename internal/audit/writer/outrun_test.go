package writer_test

import (
	"errors"
	"testing"

	"github.com/latticekeep/latticekeep/internal/audit/keeper"
	"github.com/latticekeep/latticekeep/internal/audit/writer"
	"github.com/latticekeep/latticekeep/test/audittest"
)

// If another process follows and archives the entries that a step is reading, the step does not
// report damage.
func TestAStepThatIsArchivedUnderneathFindsNoDamage(t *testing.T) {
	outrun := 0
	for at := int64(1); ; at++ {
		f := audittest.NewFixture(t)
		a, _ := f.Folder()
		f.Old()
		other := f.Another(f.Store)
		s := &audittest.Between{Store: f.Store, At: at, Do: func() error {
			_, err := (&keeper.Cutter{Log: other.Log, Reader: other.Reader, Archive: a, Keep: audittest.Keep}).Run(t.Context())
			return err
		}}
		f.Log.Chain.Store = s
		if _, err := f.Log.Step(t.Context()); errors.Is(err, writer.ErrOutrun) {
			outrun++
		} else if err != nil {
			t.Errorf("archived before look %d: %v", at, err)
		}
		f.Log.Chain.Store = f.Store
		if _, err := f.Log.Follow(t.Context()); err != nil {
			t.Errorf("archived before look %d: %v", at, err)
		}
		if s.Views.Load() < at {
			break
		}
	}
	if outrun == 0 {
		t.Error("no step was outrun")
	}
}
