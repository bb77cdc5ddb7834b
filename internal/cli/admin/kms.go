package admin

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

func NewKMSCommand() *cobra.Command {
	var r command.Server
	return command.NewGroup("kms", "Administer the KMS keys of a running server", `Administer the keys of the key-management service that wrap all other keys, with a system key.

To move to another key: give every replica the new one as kms.url and the one it has as kms.former, run latticekeep kms
rewrap, and take the previous one out of the configuration again.`, &r,
		command.NewCall(&r, "status", "List the KMS keys, and how many sets of keys are under each", cobra.NoArgs,
			func(ctx context.Context, c *client.V2, _ []string) (*v2.KMSKeyList, error) { return c.ListKMSKeys(ctx) },
			func(out, note io.Writer, a *v2.KMSKeyList) {
				showKMSKeys(out, a.KmsKeys)
				noteDamaged(note, a.DamagedSets)
			}),
		newRewrapCommand(&r))
}

func showKMSKeys(out io.Writer, keys []v2.KMSKey) {
	var rows [][]string
	for _, k := range keys {
		state := string(k.State)
		if k.GivenUp {
			state += ",given-up"
		}
		rows = append(rows, []string{command.Printable(k.KeyId), state, strconv.Itoa(k.Sets)})
	}
	command.Table(out, "KEY_ID STATE SETS", rows)
}

func noteDamaged(note io.Writer, sets int) {
	if sets > 0 {
		fmt.Fprintf(note, "%d sets of keys are damaged: they stay as they are; restore them from a backup\n", sets)
	}
}

func newRewrapCommand(r *command.Server) *cobra.Command {
	var o rewrapOptions
	cmd := &cobra.Command{
		Use: "rewrap", Short: "Move all keys to the current KMS key while the server goes on",
		Long: `Move the keys of every tenant and of the deployment under the KMS key that kms.url names, while the server runs. It can be
interrupted at any time, and resumes when it is run again. The keys themselves stay the same.

With --again it also wraps again what is under that key already: use it after the provider has rotated the key, so that
the previous version is no longer needed.

With --destroy-old the keys that kms.former names are destroyed at their providers, once nothing is under them. It first
prints what becomes unreadable, and asks for each key's id, unless there is --yes.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := r.Client()
			if err != nil {
				return err
			}
			return o.run(cmd.Context(), c, cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&o.again, "again", false, "also wrap again what is under the current key already")
	flags.BoolVar(&o.destroy, "destroy-old", false, "then destroy the previous keys at their providers, for good")
	flags.BoolVar(&o.yes, "yes", false, "do not ask before a key is destroyed")
	return cmd
}

type rewrapOptions struct{ again, destroy, yes bool }

func (o rewrapOptions) run(ctx context.Context, c *client.V2, in io.Reader, out, note io.Writer) error {
	found, err := c.ListKMSKeys(ctx)
	if err != nil {
		return err
	}
	var request v2.RewrapKeysRequest
	if o.again {
		request.WrappedBefore = &found.CheckedAt
	}
	current, former := kmsKeysByState(found.KmsKeys)
	answer, err := moveAll(ctx, c, request, current, note)
	if err != nil {
		return err
	}
	showKMSKeys(out, answer.KmsKeys)
	noteDamaged(note, answer.DamagedSets)
	if len(former) > 0 && answer.DamagedSets == 0 {
		fmt.Fprintln(note, "no keys are under a previous KMS key any more: remove it from kms.former on every replica")
	}
	if !o.destroy {
		return nil
	}
	switch {
	case answer.DamagedSets > 0:
		return errors.New("no key was destroyed, since damaged keys may be under it")
	case len(former) == 0:
		return command.UsageError("there is no previous key to destroy: name it in kms.former")
	}
	return o.destroyAll(ctx, c, former, bufio.NewReader(in), out, note)
}

func kmsKeysByState(keys []v2.KMSKey) (current string, former []string) {
	for _, k := range keys {
		switch k.State {
		case v2.KMSKeyStateCurrent:
			current = k.KeyId
		case v2.KMSKeyStateFormer:
			former = append(former, k.KeyId)
		}
	}
	return current, former
}

// moveAll rewraps keys in steps until none remain. Steps that are done stay done if a later one
// fails.
func moveAll(ctx context.Context, c *client.V2, request v2.RewrapKeysRequest, current string, note io.Writer) (*v2.RewrapKeysAnswer, error) {
	moved := 0
	for {
		answer, err := c.RewrapKeys(ctx, request)
		if err != nil {
			return nil, fmt.Errorf("moving keys stopped after %d sets; nothing is lost, run the command again to resume: %w", moved, err)
		}
		if now, _ := kmsKeysByState(answer.KmsKeys); now != current {
			return nil, fmt.Errorf("moving keys: after %d sets; the replicas have different keys in kms.url (%s and %s): give all the same key, then run the command again",
				moved, command.Printable(current), command.Printable(now))
		}
		moved += answer.Moved
		fmt.Fprintf(note, "moved %d sets of keys, %d remain\n", moved, answer.Remaining)
		if answer.Remaining == 0 {
			return answer, nil
		}
	}
}

func (o rewrapOptions) destroyAll(ctx context.Context, c *client.V2, former []string, in *bufio.Reader, out, note io.Writer) error {
	for _, id := range former {
		fmt.Fprintf(note, `
Destroying KMS key %s makes unreadable, for good and for everybody, what was copied while keys were under it:
  - every backup that was taken before this run ended
  - snapshots of the volume or of the database, also when they are restored
  - replicas of the database that are behind, its write-ahead log and archives of that
Take a backup now, before you go on, and see that it restores.
`, command.Printable(id))
		if !o.yes {
			fmt.Fprint(note, "Type the id of the key to destroy it: ")
			line, err := in.ReadString('\n')
			if typed := strings.TrimSpace(line); typed != id {
				if err != nil && typed == "" {
					return command.UsageError("the key was not destroyed: its id was not typed; type it, or give --yes")
				}
				return command.UsageError("the key was not destroyed: what was typed is not its id")
			}
		}
		answer, err := c.DestroyKMSKey(ctx, v2.DestroyKMSKeyRequest{KeyId: id})
		if err != nil {
			return fmt.Errorf("destroying KMS key %s: %w", command.Printable(id), err)
		}
		fmt.Fprintln(out, command.Printable(id), "destroyed")
		if answer.FinalAt != nil {
			fmt.Fprintf(note, "until %s this can be undone: %s\n", answer.FinalAt.UTC().Format(time.RFC3339), valueOr(answer.Undo, "ask its provider"))
		}
		if answer.Left != nil {
			fmt.Fprintf(note, "what may still hold it: %s\n", *answer.Left)
		}
	}
	return nil
}

func valueOr(s *string, otherwise string) string {
	if s == nil {
		return otherwise
	}
	return *s
}
