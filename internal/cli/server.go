package cli

import (
	"errors"
	"os"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/config"
	"github.com/latticekeep/latticekeep/internal/dumps"
)

func newServerCommand() *cobra.Command {
	var c app.DevConfig
	var dev, check bool
	var output command.Output
	var file string
	cmd := &cobra.Command{
		Use:   "server --config FILE [--check-config] | --dev",
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

--check-config starts nothing. It says everything that is wrong in the configuration,
with its line, and looks at each part that a start would use: files, disk, store,
PostgreSQL, KMS, anchors, buckets, mail server, certificates, clock. It changes
nothing and makes no file. A server may be running on the same deployment. The exit
status is 0 when all is well, also with warnings, 1 when something is wrong, 2 when
the configuration cannot be used, 3 when something does not answer, and 4 when
something refuses. latticekeep doctor verifies the audit log and the rows as well.

--dev runs a development server, which needs nothing and reads no
configuration. Once ready, one JSON line on stdout says where: base_url,
tenant_id, api_key, data_dir and dashboard_url. The API key has all scopes of
the tenant. Started again on the same --data-dir the server keeps all data and
the tenant, makes a new key and revokes the one it made before. Mails are files
in the folder mail of the data directory.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c.Stdout, c.Stderr = cmd.OutOrStdout(), cmd.ErrOrStderr()
			if err := output.Check(cmd, check); err != nil {
				return err
			}
			if check && file == "" {
				return command.UsageError("--check-config is for the configuration of --config FILE")
			}
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
			if check {
				return checkConfig(cmd, output, s, err)
			}
			if err != nil {
				return &command.StatusError{Status: command.StatusUsage, Err: err}
			}
			return app.Serve(cmd.Context(), s, c.Stdout, c.Stderr)
		},
	}
	flags := cmd.Flags()
	flags.BoolVar(&dev, "dev", false, "run a development server: embedded store, key file beside it, plain HTTP")
	flags.StringVar(&file, "config", "", "run a production server with this configuration file")
	flags.BoolVar(&check, "check-config", false, "check the configuration and what it names, and start nothing")
	output.Register(cmd, "form of the report of --check-config: ")
	flags.StringVar(&c.DataDir, "data-dir", "", "folder of the database (with --dev also of the key; default a temporary one, removed at the end)")
	flags.StringVar(&c.Listen, "listen", config.DefaultListen, "address to listen on; port 0 takes a free one")
	flags.StringVar(&c.Kubeconfig, "kubeconfig", "", "kubeconfig of the cluster to be the operator of")
	cmd.MarkFlagsMutuallyExclusive("dev", "config")
	return cmd
}

// checkConfig prints what is wrong with a configuration, or with the parts that it names.
func checkConfig(cmd *cobra.Command, output command.Output, c config.Config, err error) error {
	var faults *config.Error
	switch {
	case errors.As(err, &faults):
		return output.Print(cmd, command.ConfigurationReport(buildinfo.Version(), faults.Faults))
	case err != nil:
		return &command.StatusError{Status: command.StatusUsage, Err: err}
	}
	return output.Print(cmd, app.Diagnose(cmd.Context(), c, false, nil))
}
