package admin

import (
	"context"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

func NewSealingKeyCommand() *cobra.Command {
	var r command.Server
	one := func(out, _ io.Writer, a *v2.SealingKeyAnswer) { showSealingKeys(out, a.SealingKey) }
	return command.NewGroup("sealing-key", "Administer the sealing keys of a running server", `Administer the keys that SealedCredential values are sealed for, with a system key.

A new key is made on schedule (sealing.keyLifetime); earlier ones keep opening what was sealed for them. Manifests move to
the newest key with latticekeep reseal, and a key that no object needs any more can be retired.`, &r,
		command.NewCall(&r, "list", "List all sealing keys, and how many objects need each", cobra.NoArgs,
			func(ctx context.Context, c *client.V2, _ []string) (*v2.SealingKeyList, error) {
				return c.ListSealingKeys(ctx)
			},
			func(out, _ io.Writer, a *v2.SealingKeyList) { showSealingKeys(out, a.SealingKeys...) }),
		command.NewCall(&r, "rotate", "Make a new sealing key and publish it", cobra.NoArgs,
			func(ctx context.Context, c *client.V2, _ []string) (*v2.SealingKeyAnswer, error) {
				return c.RotateSealingKey(ctx)
			}, one),
		command.NewCall(&r, "retire KEY_ID", "Archive a sealing key that no object needs: what is sealed for it is refused", cobra.ExactArgs(1),
			func(ctx context.Context, c *client.V2, args []string) (*v2.SealingKeyAnswer, error) {
				return c.RetireSealingKey(ctx, args[0])
			}, one),
		command.NewCall(&r, "restore KEY_ID", "Take a retired sealing key back into use", cobra.ExactArgs(1),
			func(ctx context.Context, c *client.V2, args []string) (*v2.SealingKeyAnswer, error) {
				return c.RestoreSealingKey(ctx, args[0])
			}, one))
}

func showSealingKeys(out io.Writer, keys ...v2.SealingKey) {
	var rows [][]string
	for _, k := range keys {
		rows = append(rows, []string{command.Printable(k.KeyId), string(k.State), command.Day(&k.CreatedAt), command.Day(k.RetiredAt), strconv.Itoa(k.Objects)})
	}
	command.Table(out, "KEY_ID STATE CREATED RETIRED OBJECTS", rows)
}
