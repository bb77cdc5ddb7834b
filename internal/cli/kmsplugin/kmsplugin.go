// Package kmsplugin provides the commands of the KMS v2 provider for kube-apiserver: one that serves,
// and those that make and change its key set.
package kmsplugin

import (
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/dumps"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/kmsplugin"
	"github.com/latticekeep/latticekeep/internal/kmsplugin/etcd"
	"github.com/latticekeep/latticekeep/internal/logs"
)

// NewCommand returns the command latticekeep kms-plugin.
func NewCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "kms-plugin", Short: "Encrypt the Secrets of a cluster in etcd: a KMS v2 provider for kube-apiserver",
		Long: `Encrypt what kube-apiserver writes to etcd, as a KMS v2 provider with ML-KEM. One plugin runs on each control-plane
node, beside the API server, and needs no Latticekeep server.

The directory of a plugin has the key set (keyset.json, the same on all nodes), the identity of the node (node.json),
the newest key set that the plugin has loaded (newest.json), and the node's log (log/). The keys in these files are wrapped
by a KMS key. Change the key set on one node, and copy keyset.json to the others: their plugins load it within seconds.`,
	}
	cmd.AddCommand(newInitCommand(), newServeCommand(), newNodeCommand(), newAddNodeCommand(), newRotateCommand(),
		newAcknowledgeCommand(), newPromoteCommand(), newRetireCommand(), newRemoveNodeCommand(), newBackupCommand(),
		newRestoreCommand(), newShowCommand(), newVerifyLogCommand(), newShipLogCommand())
	return cmd
}

func newInitCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use: "init", Short: "Make the key set and the identity of the first node", Args: cobra.NoArgs,
		Long: `Make the first key set of a cluster, with one generation of keys, and the identity of this node. Keep a copy of
keyset.json and the KMS key: without either, no Secret in etcd can be read.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.checkAlgorithm(); err != nil {
				return err
			}
			defer o.custody.Close()
			s, err := kmsplugin.Init(cmd.Context(), &o.custody, o.dir, o.node, o.kms, envelope.KEM(o.algorithm))
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.OutOrStdout(), "key set %s\n", s.ID)
			return nil
		},
	}
	o.registerDir(cmd)
	o.registerNode(cmd)
	o.registerToken(cmd)
	o.registerAlgorithm(cmd, envelope.MLKEM768, "ML-KEM-768 or ML-KEM-1024")
	return cmd
}

func newServeCommand() *cobra.Command {
	var o options
	var socket string
	var requireLog bool
	cmd := &cobra.Command{
		Use: "serve", Short: "Serve kube-apiserver on this node", Args: cobra.NoArgs,
		Long: `Serve kube-apiserver at a socket, to which only the user of this process can connect. The KMS is needed at the start, and
when the key set gets a new generation; after that the keys are in memory until the process ends. The key set file is
read again when it changes. When it is refused, the previous one serves on, and the log says why.

Each seed that is wrapped or opened is an entry of the node's own log, signed and on disk before the API server has the
answer. When that log is full or cannot be written, the plugin serves on, and the next entry counts what has none. With
--require-log it refuses instead: the API server then reads and writes no Secret until the log takes entries.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := dumps.Forbid(); err != nil {
				return err
			}
			limited, end := logs.Limit(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
			defer end()
			return kmsplugin.Serve(cmd.Context(), kmsplugin.Config{
				Dir: o.dir, Socket: socket, Logger: slog.New(limited), TokenFile: o.custody.TokenFile, RequireLog: requireLog,
			})
		},
	}
	o.registerDir(cmd)
	o.registerToken(cmd)
	cmd.Flags().StringVar(&socket, "socket", "", "path of the socket, such as /run/latticekeep/kms.sock")
	cmd.Flags().BoolVar(&requireLog, "require-log", false, "refuse what the node's log does not take")
	_ = cmd.MarkFlagRequired("socket") // cannot fail: the flag exists
	return cmd
}

func newNodeCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use: "node", Short: "Make the identity of a further node and print its public part", Args: cobra.NoArgs,
		Long: `Make the identity of a further node, on that node, and print its public part. Give that to latticekeep kms-plugin
add-node where the key set is changed, and copy keyset.json to this node.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			defer o.custody.Close()
			n, err := kmsplugin.NewNode(cmd.Context(), &o.custody, o.dir, o.node, o.kms)
			if err != nil {
				return err
			}
			return printFile(cmd.OutOrStdout(), n)
		},
	}
	o.registerDir(cmd)
	o.registerNode(cmd)
	o.registerToken(cmd)
	return cmd
}

func newAddNodeCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use: "add-node FILE", Short: "Add a node to the key set", Args: cobra.ExactArgs(1),
		Long: `Add a node to the key set. FILE is the output of latticekeep kms-plugin node on that node. Copy keyset.json to all
nodes then.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			b, err := command.ReadFile(args[0], maxFile)
			if err != nil {
				return err
			}
			f, err := kmsplugin.ParseNode(b)
			if err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			defer o.custody.Close()
			s, err := kmsplugin.AddNode(cmd.Context(), &o.custody, o.dir, f.Node)
			return changed(cmd, s, err)
		},
	}
	o.registerDir(cmd)
	o.registerToken(cmd)
	return cmd
}

func newRotateCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use: "rotate", Short: "Add a pending generation of keys to the key set", Args: cobra.NoArgs,
		Long: `Add a pending generation of keys to the key set, or replace the pending one that is there. Copy keyset.json to all nodes,
run latticekeep kms-plugin acknowledge on each, and give the outputs to latticekeep kms-plugin promote.

With --kms the new generation and the key that signs the key set are under another KMS key, and the next acknowledge on
each node moves its node.json there. The plugins need the previous KMS key as long as the key set has a generation under it.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.checkAlgorithm(); err != nil {
				return err
			}
			defer o.custody.Close()
			s, err := kmsplugin.Rotate(cmd.Context(), &o.custody, o.dir, o.kms, envelope.KEM(o.algorithm))
			return changed(cmd, s, err)
		},
	}
	o.registerDir(cmd)
	o.registerToken(cmd)
	cmd.Flags().StringVar(&o.kms, "kms", "", "URL of another KMS key for the new generation (default: that of the current one)")
	o.registerAlgorithm(cmd, "", "ML-KEM-768 or ML-KEM-1024 (default: that of the current generation)")
	return cmd
}

func newAcknowledgeCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use: "acknowledge", Short: "Sign that the plugin of this node has loaded the key set", Args: cobra.NoArgs,
		Long: `Sign, with the key of this node, that its plugin has loaded keyset.json as it is now, and print the acknowledgement. It
fails while the plugin has not loaded it.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			defer o.custody.Close()
			a, err := kmsplugin.Acknowledge(cmd.Context(), &o.custody, o.dir, time.Now())
			if err != nil {
				return err
			}
			return printFile(cmd.OutOrStdout(), a)
		},
	}
	o.registerDir(cmd)
	o.registerToken(cmd)
	return cmd
}

func newPromoteCommand() *cobra.Command {
	var o options
	var force bool
	cmd := &cobra.Command{
		Use: "promote [FILE...]", Short: "Make the pending generation of keys the current one", Args: cobra.ArbitraryArgs,
		Long: `Make the pending generation of keys the current one. Each FILE is the output of latticekeep kms-plugin acknowledge on one
node, and every node of the key set is needed. Copy keyset.json to all nodes then.

With --force it does not need all of them, and names those that are missing. The API server of such a node cannot read
what the others write, until its plugin has loaded this key set.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			given, err := readAcknowledgements(args)
			if err != nil {
				return err
			}
			defer o.custody.Close()
			s, missing, err := kmsplugin.Promote(cmd.Context(), &o.custody, o.dir, given, force)
			if err == nil {
				for _, name := range missing {
					fmt.Fprintf(cmd.ErrOrStderr(), "node %s has not acknowledged the generation\n", name)
				}
			}
			return changed(cmd, s, err)
		},
	}
	o.registerDir(cmd)
	o.registerToken(cmd)
	cmd.Flags().BoolVar(&force, "force", false, "promote without the acknowledgements of all nodes, and name those that are missing")
	return cmd
}

func readAcknowledgements(paths []string) (given []kmsplugin.Acknowledgement, err error) {
	for _, path := range paths {
		b, err := command.ReadFile(path, maxFile)
		if err != nil {
			return nil, err
		}
		a, err := kmsplugin.ParseAcknowledgement(b)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		given = append(given, a)
	}
	return given, nil
}

func newRetireCommand() *cobra.Command {
	var o options
	var generation uint64
	var urls []string
	var access etcd.Config
	cmd := &cobra.Command{
		Use: "retire FILE...", Short: "Remove a previous generation of keys that no object in etcd needs", Args: cobra.MinimumNArgs(1),
		Long: `Remove a previous generation of keys from the key set. Each FILE is the output of latticekeep kms-plugin acknowledge on one
node, after it has loaded the newest key set; every node is needed, and each must be five minutes old, because an
API server writes under the previous generation for up to three, and at most an hour.

It reads all objects in etcd, decodes the key id alone, and refuses while one object names the generation. Give --etcd
once for each etcd cluster that the API servers use (--etcd-servers and --etcd-servers-overrides).

Backups of etcd may still need the generation. So the previous key set is kept beside keyset.json.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			given, err := readAcknowledgements(args)
			if err != nil {
				return err
			}
			defer o.custody.Close()
			s, kept, err := kmsplugin.Retire(cmd.Context(), &o.custody, o.dir, kmsplugin.Retirement{
				Number: generation, Acknowledgements: given, Now: time.Now(),
				KeyIDsInEtcd: func() (map[string]etcd.Use, error) {
					found, err := etcd.KeyIDs(cmd.Context(), access, urls)
					for id, use := range found {
						fmt.Fprintf(cmd.ErrOrStderr(), "%d objects in etcd name %s\n", use.Objects, command.Printable(id))
					}
					return found, err
				},
			})
			if err == nil {
				fmt.Fprintf(cmd.OutOrStdout(), "%s is kept: backups of etcd that were taken until now need it, and its KMS keys\n", kept)
			}
			return changed(cmd, s, err)
		},
	}
	o.registerDir(cmd)
	o.registerToken(cmd)
	flags := cmd.Flags()
	flags.Uint64Var(&generation, "generation", 0, "number of the generation")
	flags.StringArrayVar(&urls, "etcd", nil, "URL of a member of an etcd cluster: https://HOST:PORT (repeatable)")
	flags.StringVar(&access.CA, "etcd-ca", "", "file with the certificates of etcd's authority (default: those of the system)")
	flags.StringVar(&access.Certificate, "etcd-cert", "", "file with the client certificate for etcd")
	flags.StringVar(&access.Key, "etcd-key", "", "file with its key")
	_ = cmd.MarkFlagRequired("generation") // cannot fail: the flag exists
	_ = cmd.MarkFlagRequired("etcd")       // likewise
	return cmd
}

func newRemoveNodeCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use: "remove-node NAME", Short: "Remove a node that is gone from the key set", Args: cobra.ExactArgs(1),
		Long: `Remove a node that is gone from the key set, so that its acknowledgements are not needed. Stop its API server and its
plugin first: that plugin loads no later key set, and what its API server writes is lost when the generation is retired.
Rotate when the node is not trusted any more, because it has had all keys.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			defer o.custody.Close()
			s, err := kmsplugin.RemoveNode(cmd.Context(), &o.custody, o.dir, args[0])
			return changed(cmd, s, err)
		},
	}
	o.registerDir(cmd)
	o.registerToken(cmd)
	return cmd
}

func newShowCommand() *cobra.Command {
	var o options
	var format command.Format
	cmd := &cobra.Command{
		Use: "show", Short: "Show the nodes and the generations of the key set", Args: cobra.NoArgs,
		Long: "Show the nodes and the generations of the key set, without the KMS.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := format.Check(); err != nil {
				return err
			}
			s, err := kmsplugin.Read(o.dir)
			if err != nil {
				return err
			}
			return format.Print(cmd.OutOrStdout(), s, func(out io.Writer) { show(out, s) })
		},
	}
	o.registerDir(cmd)
	format.Register(cmd)
	return cmd
}

func show(out io.Writer, s *kmsplugin.KeySet) {
	fmt.Fprintf(out, "key set %s, revision %d\n", s.ID, s.Revision)
	for _, n := range s.Nodes {
		fmt.Fprintf(out, "node %s\n", n.Name)
	}
	var rows [][]string
	for _, g := range s.Generations {
		rows = append(rows, []string{strconv.FormatUint(g.Number, 10), string(g.State), string(g.Algorithm), command.Printable(g.KMS), g.KeyID})
	}
	command.Table(out, "GENERATION STATE ALGORITHM KMS KEY_ID", rows)
}
