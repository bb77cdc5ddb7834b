package cli

import (
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/app"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/dumps"
)

func newWebhookCommand() *cobra.Command {
	o := app.Webhook{After: time.After}
	cmd := &cobra.Command{
		Use:   "webhook",
		Short: "Run the admission webhook for SealedCredentials",
		Long: `Run the validating admission webhook, which refuses SealedCredentials at kubectl apply and says what to do. It keeps
nothing and reads nothing from the API server: whether values open and policy allows them, it asks the vault of --url
with the ServiceAccount token of --token-file. When the vault does not answer, objects are admitted with a warning,
and the operator refuses in a condition what it would have refused here.

Certificate, key, CA and token are read again when their files change. While the certificate is missing the webhook
waits for it and is not ready. --operations-listen serves /healthz, /readyz and /metrics in the clear.

With --client-ca-file it serves nobody but an API server that shows a certificate of that authority, and of one of the
names in --client-name; docs/guides/admission.md says how an API server is told to.`,
		Example: `  latticekeep webhook --url https://latticekeep.latticekeep-system.svc:8200 --ca-file /etc/latticekeep/ca/ca.crt \
    --token-file /var/run/secrets/latticekeep/token --cert-file tls.crt --key-file tls.key`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if len(o.ClientNames) > 0 && o.ClientCAFile == "" {
				return command.UsageError("--client-name needs --client-ca-file: without it no certificate is asked for")
			}
			if o.Vault.URL == "" {
				return command.UsageError("no vault: set --url or " + command.URLVariable)
			}
			if _, err := o.Log.Logger(io.Discard); err != nil {
				return command.UsageError("--log-level and --log-format: " + err.Error())
			}
			if err := dumps.Forbid(); err != nil {
				return err
			}
			o.Stderr = cmd.ErrOrStderr()
			return o.Run(cmd.Context())
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Listen, "listen", ":8443", "address to take reviews at, with TLS")
	f.StringVar(&o.Operations, "operations-listen", ":8444", "address of /healthz, /readyz and /metrics, in the clear")
	f.StringVar(&o.CertFile, "cert-file", "", "certificate with its chain, PEM")
	f.StringVar(&o.KeyFile, "key-file", "", "its key, PEM")
	command.RegisterURL(f, &o.Vault.URL, "base URL of the vault, such as https://latticekeep.latticekeep-system.svc:8200")
	f.StringVar(&o.Vault.CAFile, "ca-file", "", "authorities that sign the vault's certificate, PEM (default those of the system)")
	f.StringVar(&o.Vault.TokenFile, "token-file", "", "ServiceAccount token with audience latticekeep")
	f.StringVar(&o.ClientCAFile, "client-ca-file", "", "authorities that sign the API server's client certificate, PEM (default: none is asked for)")
	f.StringSliceVar(&o.ClientNames, "client-name", nil, "common name or DNS name of that certificate; may be repeated (default any)")
	f.StringVar(&o.Log.Level, "log-level", "info", "least severity that is logged: debug, info, warn or error")
	command.Choices(cmd, "log-level", "debug", "info", "warn", "error")
	f.StringVar(&o.Log.Format, "log-format", "json", "json, or text for people")
	command.Choices(cmd, "log-format", "json", "text")
	command.Duration(cmd, &o.Drain, "drain", 5*time.Second, 0, "how long to go on when told to end, not ready any more, until nobody sends reviews here")
	for _, name := range []string{"cert-file", "key-file", "token-file"} {
		_ = cmd.MarkFlagRequired(name) // cannot fail: the flag exists
	}
	return cmd
}
