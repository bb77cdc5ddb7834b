package kmsplugin

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/envelope"
	"github.com/latticekeep/latticekeep/internal/kmsplugin"
)

const maxFile = 64 << 10 // bytes of a node's identity or an acknowledgement

// options are the flags that several commands have.
type options struct {
	dir, kms, node string
	algorithm      string
	custody        kmsplugin.Custody
}

func (o *options) registerDir(cmd *cobra.Command) {
	cmd.Flags().StringVar(&o.dir, "dir", "", "directory of the plugin on this node")
	_ = cmd.MarkFlagRequired("dir") // cannot fail: the flag exists
}

func (o *options) registerToken(cmd *cobra.Command) {
	cmd.Flags().StringVar(&o.custody.TokenFile, "kms-token-file", "", "file with the token of a hashivault:// KMS key")
}

func (o *options) registerNode(cmd *cobra.Command) {
	flags := cmd.Flags()
	flags.StringVar(&o.node, "node", "", "name of this node")
	flags.StringVar(&o.kms, "kms", "", "URL of the KMS key, without credentials: file:///path, awskms://…, gcpkms://… or hashivault://…")
	_ = cmd.MarkFlagRequired("node") // cannot fail: the flag exists
	_ = cmd.MarkFlagRequired("kms")  // likewise
}

func (o *options) registerAlgorithm(cmd *cobra.Command, value envelope.KEM, use string) {
	cmd.Flags().StringVar(&o.algorithm, "algorithm", string(value), use)
	command.Choices(cmd, "algorithm", envelope.MLKEM768, envelope.MLKEM1024)
}

func (o *options) checkAlgorithm() error {
	switch envelope.KEM(o.algorithm) {
	case "", envelope.MLKEM768, envelope.MLKEM1024:
		return nil
	}
	return command.UsageError(fmt.Sprintf("--algorithm takes %s or %s", envelope.MLKEM768, envelope.MLKEM1024))
}

// changed says to which revision the key set was changed.
func changed(cmd *cobra.Command, s *kmsplugin.KeySet, err error) error {
	if err != nil {
		return err
	}
	fmt.Fprintf(cmd.OutOrStdout(), "key set %s has revision %d: copy keyset.json to all nodes, and to the copy outside the cluster\n", s.ID, s.Revision)
	return nil
}

func printFile[T kmsplugin.NodeFile | kmsplugin.Acknowledgement](out io.Writer, v T) error {
	b, err := kmsplugin.Encode(v)
	if err == nil {
		_, err = out.Write(b)
	}
	return err
}
