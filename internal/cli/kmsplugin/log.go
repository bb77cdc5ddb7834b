package kmsplugin

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/kmsplugin"
	"github.com/latticekeep/latticekeep/internal/nodelog"
)

const maxKeySet = 1 << 20 // bytes of a key set

func newVerifyLogCommand() *cobra.Command {
	var dir, keySet string
	var format command.Format
	cmd := &cobra.Command{
		Use: "verify-log [FILE...]", Short: "Verify the log of a node", Args: cobra.ArbitraryArgs,
		Long: `Verify the log of a node: the signature of each entry, and that each follows the one before. With --dir it is the log of the
node with that directory, whose plugin may serve meanwhile. With --key-set it is in each FILE, in their order: copies of
files of one node are enough, together with a keyset.json that names the node. Neither needs the KMS.

A log that begins after entry 1 was shortened by files that were shipped, or moved away. The log itself cannot show that
entries at its end are missing: compare it with what was shipped.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := format.Check(); err != nil {
				return err
			}
			s, err := verifyLog(dir, keySet, args)
			if err != nil {
				return err
			}
			return format.Print(cmd.OutOrStdout(), s, func(out io.Writer) { showLog(out, s) })
		},
	}
	cmd.Flags().StringVar(&dir, "dir", "", "directory of the plugin on this node")
	cmd.Flags().StringVar(&keySet, "key-set", "", "keyset.json, which names the node of the files")
	format.Register(cmd)
	return cmd
}

func verifyLog(dir, keySet string, files []string) (kmsplugin.LogSummary, error) {
	switch {
	case dir != "" && keySet == "" && len(files) == 0:
		return kmsplugin.VerifyLog(dir)
	case dir != "" || keySet == "" || len(files) == 0:
		return kmsplugin.LogSummary{}, command.UsageError("give either --dir, or --key-set and each FILE of the log")
	}
	b, err := command.ReadFile(keySet, maxKeySet)
	if err != nil {
		return kmsplugin.LogSummary{}, err
	}
	return kmsplugin.VerifyLogFiles(b, files)
}

func showLog(out io.Writer, s kmsplugin.LogSummary) {
	fmt.Fprintf(out, "the log of node %s verifies, by key set %s\n", s.NodeName, s.KeySet)
	fmt.Fprintf(out, "chain %s, node key %s\n", s.Chain, s.Node)
	command.Table(out, "ENTRY AT HASH", [][]string{
		{strconv.FormatUint(s.From, 10), s.FirstAt.Format(time.RFC3339), s.FirstHash},
		{strconv.FormatUint(s.To, 10), s.LastAt.Format(time.RFC3339), s.LastHash},
	})
	fmt.Fprintf(out, "%d starts, %d seeds wrapped, %d opened, %d without an entry\n", s.Kinds[nodelog.Started], s.Kinds[nodelog.Wrapped], s.Kinds[nodelog.Opened], s.Dropped)
}

func newShipLogCommand() *cobra.Command {
	var o options
	var server command.Server
	cmd := &cobra.Command{
		Use: "ship-log", Short: "Record in a server's audit log which entries the log of this node has", Args: cobra.NoArgs,
		Long: `Have a Latticekeep server record, as one entry of its audit log, which entries the log of this node has that it does not
know yet: their number, and the hashes of the first and the last one. From then on nobody can change them without a trace, not
even with the key of this node. The entries stay on the node, and the plugin may remove them once it needs the room.

Run it from time to time, for example every hour. It verifies the whole log each time. Nothing is recorded twice, whenever it is cut
off. It takes the scope audit:write. The plugin does not need the server, but removes what this server says that it has recorded.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, node, err := kmsplugin.ReadNode(o.dir)
			if err != nil {
				return err
			}
			c, err := server.Client()
			if err != nil {
				return err
			}
			shipped, err := nodelog.ShipAll(cmd.Context(), o.dir, node.PublicKey, recordWith(c))
			switch {
			case err != nil:
				return err
			case shipped.Count == 0:
				fmt.Fprintln(cmd.OutOrStdout(), "the server has all entries")
			default:
				fmt.Fprintf(cmd.OutOrStdout(), "the server has recorded entries %d to %d; the last one has hash %s\n", shipped.From, shipped.To, shipped.LastHash)
			}
			return nil
		},
	}
	o.registerDir(cmd)
	server.RegisterConnection(cmd)
	return cmd
}

// recordWith ships to a server.
func recordWith(c *client.V2) nodelog.Ship {
	return func(ctx context.Context, publicKey []byte, first, last *nodelog.Entry) (nodelog.Receipt, error) {
		at, err := c.RecordNodeLog(ctx, v2.NodeLogRequest{PublicKey: publicKey, First: sent(first), Last: sent(last)})
		if err != nil {
			return nodelog.Receipt{}, err
		}
		return nodelog.Receipt{Sequence: uint64(at.Sequence), Hash: at.Hash, Recorded: at.Recorded}, nil
	}
}

func sent(e *nodelog.Entry) v2.NodeLogEntry {
	s := v2.NodeLogEntry{
		Version: v2.NodeLogEntryVersion(e.Version), Node: e.Node, Chain: e.Chain, Sequence: int64(e.Sequence), Previous: e.Previous,
		At: e.At, Kind: v2.NodeLogEntryKind(e.Kind), Signature: e.Signature,
	}
	if e.KeyID != "" {
		s.KeyId, s.Seed = &e.KeyID, &e.Seed
	}
	if count := int64(e.Count); count > 0 {
		s.Count = &count
	}
	return s
}
