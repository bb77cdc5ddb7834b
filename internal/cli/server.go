package cli

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/dumps"
)

func newServerCommand() *cobra.Command {
	var c app.DevConfig
	var dev bool
	var file string
	cmd := &cobra.Command{
		Use:   "server --config FILE | --dev",
		Short: "Run the HTTP service, and the operator beside it",
		Long: `Run the HTTP service, on an embedded store or PostgreSQL, and the operator when there is a
kubeconfig or the process runs in a pod with a ServiceAccount token. While the
cluster does not answer, lacks the CRD or belongs to another deployment, the
HTTP service runs alone and the operator is retried.

--config runs a production server; docs/reference/configuration.md lists every setting.
Environment variables (LATTICEKEEP_DATA_DIR is dataDir) go before the file, and
flags before both. On its first start it writes the system key to the file that
systemKeyFile names. Once ready, one JSON line on stdout says base_url,
data_dir, identity and chain.

--dev runs a development server, which needs nothing and reads no
configuration. Once ready, one JSON line on stdout says where: base_url,
tenant_id, api_key, data_dir and dashboard_url. The API key has all scopes of
the tenant. Started again on the same --data-dir the server keeps all data and
the tenant, makes a new key and revokes the one it made before. Mails are files
in the folder mail of the data directory.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c.Stdout, c.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
			if err := dumps.Forbid(); err != nil {
				return err
			}
			switch {
			case dev:
				return app.Dev(cmd.Context(), c)
			case file == "":
				return command.UsageError("no server is chosen: give --config FILE for production, or --dev")
			}
			flags := make(map[string]string)
			for flag, key := range map[string]string{"listen": "listen", "data-dir": "dataDir", "kubeconfig": "kubernetes.kubeconfig"} {
				if f := cmd.Flags().Lookup(flag); f.Changed {
					flags[key] = f.Value.String()
				}
			}
			s, err := config.Load(file, os.Environ(), flags)
			if err != nil {
				return &command.StatusError{Status: command.StatusUsage, Err: err}
			}
			return app.Serve(cmd.Context(), s, c.Stdout, c.Stderr)
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&dev, "dev", false, "run a development server: embedded store, key file beside it, plain HTTP")
	flags.StringVar(&file, "config", "", "run a production server with this configuration file")
	flags.StringVar(&c.DataDir, "data-dir", "", "folder of the database (with --dev also of the key; default a temporary one, removed at the end)")
	flags.StringVar(&c.Listen, "listen", config.DefaultListen, "address to listen on; port 0 takes a free one")
	flags.StringVar(&c.Kubeconfig, "kubeconfig", "", "kubeconfig of the cluster to be the operator of")
	cmd.MarkFlagsMutuallyExclusive("dev", "config")
	return cmd
}
