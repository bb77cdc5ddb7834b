package score

import (
	"context"
	"errors"
	"fmt"
	"net/url"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/keyring"
)

func newReportCommand() *cobra.Command {
	var r command.Server
	var framework, format, output, identity string
	var head uint64
	cmd := &cobra.Command{
		Use:   "report --url URL --framework NAME --output FILE",
		Short: "Fetch a report of a running server with its signature",
		Long: `Fetch a report on a framework, and the detached ML-DSA-65 signature of the
deployment, which goes to FILE.sig. The same head gives the same report, byte by
byte. The API key needs the scope compliance:read.

--identity, the fingerprint of the deployment that sealed manifests are pinned to
as well, has the signature checked. Without it nobody has looked at who signed. To
check what the report says, compute it again: it names the command.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := command.CheckNotEmpty(cmd, "identity", "output"); err != nil {
				return err
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			for _, path := range []string{output, output + ".sig"} {
				if err := durable.CheckAbsent(path); err != nil {
					return err
				}
			}
			params := &v2.GetComplianceReportParams{Framework: v2.Framework(framework)}
			if head > 0 {
				n := int64(head)
				params.Head = &n
			}
			if format != "" {
				f := v2.GetComplianceReportParamsFormat(format)
				params.Format = &f
			}
			report, signature, answer, err := fetchReport(cmd.Context(), c, params)
			if err != nil {
				return err
			}
			signed := "its signature was not verified: give --identity to verify who signed it"
			if identity != "" {
				if err := checkReport(cmd.Context(), c, report, signature, identity); err != nil {
					return err
				}
				signed = "signed by the pinned identity"
			}
			// The signature first: there is no report without one.
			if err := durable.WriteNew(output+".sig", signature); err != nil {
				return err
			}
			if err := durable.WriteNew(output, report); err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: as of entry %d %s\n%s\n", output, answer.Head.Sequence, answer.Head.Hash, signed)
			return err
		},
	}
	r.RegisterConnection(cmd)
	flags := cmd.Flags()
	flags.StringVar(&framework, "framework", "", "one of "+frameworks())
	flags.Uint64Var(&head, "head", 0, "sequence of the tenant's entry as of which to judge (default its newest)")
	flags.StringVar(&format, "format", "pdf", "pdf, oscal, or ksi for fedramp")
	flags.StringVar(&output, "output", "", "file to write; neither it nor FILE.sig may exist")
	flags.StringVar(&identity, "identity", "", "fingerprint of the identity that must have signed the report")
	_ = cmd.MarkFlagRequired("framework") // the flags exist
	_ = cmd.MarkFlagRequired("output")
	return cmd
}

func fetchReport(ctx context.Context, c *client.V2, params *v2.GetComplianceReportParams) (report, signature []byte, answer *v2.ComplianceReport, err error) {
	if answer, err = c.GetComplianceReport(ctx, params); err != nil {
		return nil, nil, nil, fmt.Errorf("asking for the report: %w", err)
	}
	for link, to := range map[string]*[]byte{answer.Url: &report, answer.SignatureUrl: &signature} {
		u, err := url.Parse(link)
		if err != nil {
			return nil, nil, nil, errors.New("the server did not answer with the URL of a report")
		}
		if *to, err = c.DownloadReport(ctx, u); err != nil {
			return nil, nil, nil, fmt.Errorf("fetching the report: %w", err)
		}
	}
	return report, signature, answer, nil
}

// checkReport verifies the signature with the identity key, which the server
// publishes with its sealing key and which the pin tells.
func checkReport(ctx context.Context, c *client.V2, report, signature []byte, identity string) error {
	doc, err := c.GetSealingKey(ctx)
	if err != nil {
		return fmt.Errorf("reading the identity key: %w", err)
	}
	key, err := dualsig.ParsePublicKey(doc.Identity.PublicKey)
	if err != nil {
		return fmt.Errorf("reading the identity key: %w", err)
	}
	if key.ID() != identity {
		return fmt.Errorf("the server's identity is %s and not the pinned one: this is another deployment", key.ID())
	}
	if !key.Verify(keyring.ReportContext, report, signature) {
		return errors.New("the signature of the report does not verify: it was altered on its way, or where it is kept")
	}
	return nil
}
