// Package score has the commands that compute compliance scores and fetch reports.
package score

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/compliance"
	"github.com/latticekeep/latticekeep/internal/export"
)

func NewCommand() *cobra.Command {
	cmd := &cobra.Command{Use: "compliance", Short: "Compute what the audit log is evidence for", Args: cobra.NoArgs}
	cmd.AddCommand(newScoreCommand(), newReportCommand())
	return cmd
}

// frameworks lists the names, for the help of a flag.
func frameworks() string {
	var names []string
	for _, f := range compliance.Frameworks() {
		names = append(names, string(f))
	}
	return strings.Join(names, ", ")
}

// scoreOptions say what is judged, and by what.
type scoreOptions struct {
	command.Server
	command.Pin
	file, tenant, catalogues string
	framework                string
	head                     uint64
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
			switch {
			case o.file != "":
				var v audit.Options
				if v, err = o.Options(cmd); err == nil {
					a, err = o.derive(v)
				}
			case o.URL != "":
				return o.ask(cmd)
			default:
				err = errors.New("say of which log: --file with an export, or --url of a running server")
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
	flags.Uint64Var(&o.head, "head", 0, "sequence of the tenant's entry as of which to judge (default its newest)")
	flags.StringVar(&o.catalogues, "catalogues", "", "folder of catalogues that replace the program's own, as compliance.catalogues of the server")
	_ = cmd.MarkFlagRequired("framework") // the flag exists
	cmd.MarkFlagsMutuallyExclusive("file", "url")
	for _, flag := range []string{"tenant", "catalogues", "fingerprint", "public-key"} {
		cmd.MarkFlagsMutuallyExclusive("url", flag)
	}
	return cmd
}

// derive verifies the export and scores it.
func (o *scoreOptions) derive(a audit.Options) (compliance.Assessment, error) {
	catalogues, err := compliance.LoadCatalogues(o.catalogues)
	if err != nil {
		return compliance.Assessment{}, err
	}
	catalogue := catalogues[compliance.Framework(o.framework)]
	if catalogue == nil {
		return compliance.Assessment{}, fmt.Errorf("there is no such framework: the frameworks are %s", frameworks())
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
	if a.Tenant = one; !one && o.tenant == "" {
		return compliance.Assessment{}, errors.New("the export is of the whole log: say with --tenant whose entries to judge")
	}
	report, err := audit.VerifyExport(f, a)
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
	judged, err := compliance.Derive(catalogue, f.EntriesOf(tenant), o.head)
	if err != nil {
		return compliance.Assessment{}, fmt.Errorf("scoring tenant %s: %w", tenant, err)
	}
	return judged, nil
}

// ask prints the score that a running server answers.
func (o *scoreOptions) ask(cmd *cobra.Command) error {
	c, err := o.Client()
	if err != nil {
		return err
	}
	params := &v2.GetComplianceScoreParams{Framework: v2.Framework(o.framework)}
	if o.head > 0 {
		head := int64(o.head)
		params.Head = &head
	}
	answer, err := c.GetComplianceScore(cmd.Context(), params)
	if err != nil {
		return fmt.Errorf("asking for the score: %w", err)
	}
	if o.JSON {
		return command.PrintJSON(cmd.OutOrStdout(), answer)
	}
	// The contract's form and ours have the same JSON.
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
		score = strconv.FormatFloat(*a.Score, 'f', 1, 64)
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
		}
	}
	fmt.Fprintln(out)
	command.Table(out, "CONTROL RESULT WEIGHT EVIDENCE", rows)
	return nil
}
