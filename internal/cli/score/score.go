// Package score provides the commands that compute compliance scores and download reports.
package score

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/audit/verify"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/dualsig"
	"github.com/latticekeep/latticekeep/internal/durable"
	"github.com/latticekeep/latticekeep/internal/export"
	"github.com/latticekeep/latticekeep/internal/keyring"
)

func NewCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "compliance", Short: "Compute what the audit log is evidence for", Args: cobra.NoArgs}
	cmd.AddCommand(newScoreCommand(), newReportCommand())
	return cmd
}

// frameworks returns the names of all frameworks, for the help of a flag.
func frameworks() string {
	var names []string
	for _, f := range compliance.Frameworks() {
		names = append(names, string(f))
	}
	return strings.Join(names, ", ")
}

// scoreOptions are the flags of latticekeep score.
type scoreOptions struct {
	command.Server
	command.Pin
	file, tenant, catalogues string
	framework                string
	head                     *int64
}

func newScoreCommand() *cobra.Command {
	var o scoreOptions
	cmd := &cobra.Command{
		Use:   "score --framework NAME (--file EXPORT | --url URL) [--head N]",
		Short: "Score a framework from an export, or ask a running server",
		Long: `Score a framework by a tenant's entries in the audit log, as of one of them. The
same entries give the same score: with --file it is computed here, from an export
of the tenant or of the whole log that is verified first, and --url asks a running
server for its own (the API key needs the scope compliance:read).

A score says how much of what the log shows went well. It does not say that a
framework is met: controls that the log has no evidence for are listed as manual.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var a compliance.Assessment
			var err error
			if o.file == "" {
				if err := o.Locate(); err != nil {
					return err
				}
			}
			switch {
			case o.file != "":
				var v verify.Options
				if v, err = o.Options(); err == nil {
					a, err = o.derive(v)
				}
			case o.URL != "":
				return o.ask(cmd)
			default:
				err = command.UsageError("say of which log: --file with an export, or --url of a running server")
			}
			if err != nil {
				return err
			}
			return o.print(cmd.OutOrStdout(), a)
		},
	}
	o.Server.Register(cmd)
	o.Pin.Register(cmd)
	flags := cmd.Flags()
	flags.StringVar(&o.file, "file", "", "export of the tenant or of the whole log, from its first entry on")
	flags.StringVar(&o.tenant, "tenant", "", "tenant to judge; needed with an export of the whole log")
	flags.StringVar(&o.framework, "framework", "", "one of "+frameworks())
	command.Choices(cmd, "framework", compliance.Frameworks()...)
	command.Int(cmd, &o.head, "head", 1, audit.MaxInteger, "sequence of the tenant's entry as of which to judge (default its newest)")
	flags.StringVar(&o.catalogues, "catalogues", "", "folder of catalogues that replace the program's own, as compliance.catalogues of the server")
	_ = cmd.MarkFlagRequired("framework") // cannot fail: the flag exists
	cmd.MarkFlagsMutuallyExclusive("file", "url", "profile")
	for _, flag := range []string{"tenant", "catalogues", "fingerprint", "public-key"} {
		cmd.MarkFlagsMutuallyExclusive("url", "profile", flag)
	}
	return cmd
}

// derive verifies the export and scores it.
func (o *scoreOptions) derive(a verify.Options) (compliance.Assessment, error) {
	catalogues, err := compliance.LoadCatalogues(o.catalogues)
	if err != nil {
		return compliance.Assessment{}, err
	}
	catalogue := catalogues[compliance.Framework(o.framework)]
	if catalogue == nil {
		return compliance.Assessment{}, command.UsageError("there is no such framework: the frameworks are " + frameworks())
	}
	f, done, err := export.OpenInput(nil, o.file)
	if err != nil {
		return compliance.Assessment{}, err
	}
	defer done()
	first, err := f.First()
	if err != nil {
		return compliance.Assessment{}, err
	}
	one := export.IsTenants(first)
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return compliance.Assessment{}, fmt.Errorf("reading the export: %w", err)
	}
	if a.Tenant, a.Unclosed = one, true; !one && o.tenant == "" {
		return compliance.Assessment{}, command.UsageError("the export is of the whole log: say with --tenant whose entries to judge")
	}
	report, err := verify.Export(f, a)
	if err != nil {
		return compliance.Assessment{}, err
	}
	tenant := o.tenant
	switch {
	case one && tenant == "":
		tenant = report.Tenant
	case one && tenant != report.Tenant:
		return compliance.Assessment{}, fmt.Errorf("the export is of tenant %q", report.Tenant)
	}
	var head uint64
	if o.head != nil {
		head = uint64(*o.head) //nolint:gosec // the flag is positive
	}
	judged, err := compliance.Derive(catalogue, f.EntriesOf(tenant), head)
	if err != nil {
		return compliance.Assessment{}, fmt.Errorf("scoring tenant %s: %w", tenant, err)
	}
	return judged, nil
}

// ask prints the score from a running server.
func (o *scoreOptions) ask(cmd *cobra.Command) error {
	c, err := o.Client()
	if err != nil {
		return err
	}
	params := &v2.GetComplianceScoreParams{Framework: v2.Framework(o.framework), Head: o.head}
	answer, err := c.GetComplianceScore(cmd.Context(), params)
	if err != nil {
		return fmt.Errorf("asking for the score: %w", err)
	}
	if o.JSON {
		return command.PrintJSON(cmd.OutOrStdout(), answer)
	}
	// The API's type and ours have the same JSON.
	var a compliance.Assessment
	b, err := json.Marshal(answer)
	if err == nil {
		err = json.Unmarshal(b, &a)
	}
	if err != nil {
		return fmt.Errorf("reading the score: %w", err)
	}
	return o.print(cmd.OutOrStdout(), a)
}

func (o *scoreOptions) print(out io.Writer, a compliance.Assessment) error {
	if o.JSON {
		return command.PrintJSON(out, a)
	}
	score := "withheld: " + a.Reason
	if a.Score != nil {
		if score = strconv.FormatFloat(*a.Score, 'f', 1, 64); a.Provisional {
			score += " (provisional: the log has no assessment of the deployment yet)"
		}
	}
	_, err := fmt.Fprintf(out, "score: %s\nframework: %s, %s\ncoverage: %d of %d controls have evidence (%s%%)\nhead: %d %s\nproof: %s up to %d\n",
		score, a.Framework, a.Version, a.Coverage.Evidenced, a.Coverage.Controls, strconv.FormatFloat(a.Coverage.Percent, 'f', 1, 64),
		a.Head.Sequence, a.Head.Hash, a.Proof.Status, a.Proof.VerifiedTo)
	if err != nil || len(a.Controls) == 0 {
		return err
	}
	var rows [][]string
	for _, c := range a.Controls {
		rows = append(rows, []string{c.ID, string(c.Result), strconv.FormatFloat(c.Weight, 'g', -1, 64), c.Title})
		for _, p := range c.Probes {
			rows = append(rows, []string{"", string(p.Result), "", p.Name + ": " + p.Detail})
			if p.Since != nil {
				rows = append(rows, []string{"", "", "", fmt.Sprintf("  the %s's, since %s: %s", p.Responsible, p.Since.Format(time.DateOnly), p.Remedy)})
			}
		}
	}
	fmt.Fprintln(out)
	command.Table(out, "CONTROL RESULT WEIGHT EVIDENCE", rows)
	return nil
}

func newReportCommand() *cobra.Command {
	var r command.Server
	var framework, format, output, identity string
	var head *int64
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
			c, err := r.Client()
			if err != nil {
				return err
			}
			for _, path := range []string{output, output + ".sig"} {
				if err := durable.CheckAbsent(path); err != nil {
					return err
				}
			}
			params := &v2.GetComplianceReportParams{
				Framework: v2.Framework(framework), Head: head, Format: new(v2.GetComplianceReportParamsFormat(format)),
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
			// The signature is written first, so that no report exists without one.
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
	command.Choices(cmd, "framework", compliance.Frameworks()...)
	command.Int(cmd, &head, "head", 1, audit.MaxInteger, "sequence of the tenant's entry as of which to judge (default its newest)")
	flags.StringVar(&format, "format", "pdf", "pdf, oscal, or ksi for fedramp")
	command.Choices(cmd, "format", v2.ComplianceReportFormatPdf, v2.ComplianceReportFormatOscal, v2.ComplianceReportFormatKsi)
	flags.StringVar(&output, "output", "", "file to write; neither it nor FILE.sig may exist")
	flags.StringVar(&identity, "identity", "", "fingerprint of the identity that must have signed the report")
	_ = cmd.MarkFlagRequired("framework") // cannot fail: the flags exist
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

// checkReport verifies the signature with the identity key. The server publishes that key in its
// sealing-key document, and the pin confirms it.
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
