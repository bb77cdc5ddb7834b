package auditlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/api/openapi"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/audit"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

func newSearchCommand() *cobra.Command {
	var r command.Server
	var f command.Format
	var event, actor, resource, outcome, from, to string
	var hours, limit *int
	var named bool
	cmd := &cobra.Command{
		Use:   "search",
		Short: "Find entries of your tenant, newest first",
		Long: `Find entries of your tenant's part of the log, newest first. All that is asked for must
hold. The search is an entry itself. It verifies nothing: latticekeep audit verify
does. The API key needs the scope audit:read, and for --names audit:names.

CSV has the columns that people filter by; a cell that a spreadsheet would take for a
formula begins with an apostrophe. NDJSON has the whole entries, one on each line. Both
have all entries, and are written while the search goes on.`,
		Example: `  latticekeep audit search --event CREDENTIAL_UNSEALED --hours 24
  latticekeep audit search --outcome denied --from 2026-11-01 -o csv --names >denied.csv`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.Check(); err != nil {
				return err
			}
			if named && !f.Is("table") && !f.Is("csv") {
				return command.UsageError("--names is for the forms table and csv: an entry itself has ids")
			}
			p := v2.QueryAuditLogParams{Hours: hours}
			if event != "" {
				p.EventType = new(v2.EventType(event))
			}
			if actor != "" {
				p.UserId = &actor
			}
			if resource != "" {
				p.ResourceId = &resource
			}
			if outcome != "" {
				p.Outcome = new(v2.QueryAuditLogParamsOutcome(outcome))
			}
			for _, t := range []struct {
				flag, text string
				to         **time.Time
			}{{"from", from, &p.From}, {"to", to, &p.To}} {
				if t.text == "" {
					continue
				}
				at, err := parseTime(t.text)
				if err != nil {
					return command.UsageError("--" + t.flag + " takes a time such as 2026-11-01 or 2026-11-01T12:00:00Z")
				}
				*t.to = &at
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			ctx, out := cmd.Context(), cmd.OutOrStdout()
			most := defaultLimit
			switch {
			case limit != nil:
				most = *limit
			case f.Is("csv"), f.Is("ndjson"):
				most = math.MaxInt
			}
			var called names
			find := func(page []v2.AuditEntry) (err error) {
				if named && len(page) > 0 {
					called, err = findNames(ctx, c, page)
				}
				return err
			}
			switch {
			case f.Is("csv"):
				w := newTable(out)
				return search(ctx, c, p, most, func(page []v2.AuditEntry) error {
					if err := find(page); err != nil {
						return err
					}
					return called.writeCSV(w, page)
				})
			case f.Is("ndjson"):
				return search(ctx, c, p, most, func(page []v2.AuditEntry) error { return writeLines(out, page) })
			}
			all := []v2.AuditEntry{}
			err = search(ctx, c, p, most, func(page []v2.AuditEntry) error {
				all = append(all, page...)
				return nil
			})
			if err != nil {
				return err
			}
			if err := find(all); err != nil {
				return err
			}
			return f.Print(out, all, func(out io.Writer) {
				var rows [][]string
				for _, e := range all {
					rows = append(rows, called.cells(&e))
				}
				command.Table(out, "SEQUENCE TIME EVENT OUTCOME ACTOR RESOURCE", rows)
			})
		},
	}
	r.RegisterConnection(cmd)
	f.Register(cmd, "csv", "ndjson")
	flags := cmd.Flags()
	flags.BoolVar(&named, "names", false, "show what ids are called, where they are called anything")
	flags.StringVar(&event, "event", "", "type of event, such as CREDENTIAL_UNSEALED")
	flags.StringVar(&actor, "actor", "", "id of who acted, such as key_…")
	flags.StringVar(&resource, "resource", "", "id of what was acted on, such as cred_…")
	flags.StringVar(&outcome, "outcome", "", "success, denied or failure")
	flags.StringVar(&from, "from", "", "earliest time, as a day in UTC or as RFC 3339")
	flags.StringVar(&to, "to", "", "latest time, likewise")
	command.Choices(cmd, "event", eventTypes()...)
	command.Choices(cmd, "outcome", v2.QueryAuditLogParamsOutcomeSuccess, v2.QueryAuditLogParamsOutcomeDenied, v2.QueryAuditLogParamsOutcomeFailure)
	command.Int(cmd, &hours, "hours", 1, 87600, "the last so many hours")
	command.Int(cmd, &limit, "limit", 1, 100_000, fmt.Sprintf("most entries to print (default %d, and all as csv and ndjson)", defaultLimit))
	cmd.MarkFlagsMutuallyExclusive("hours", "from")
	cmd.MarkFlagsMutuallyExclusive("hours", "to")
	return cmd
}

const defaultLimit = 20

func parseTime(text string) (time.Time, error) {
	if day, err := time.Parse(time.DateOnly, text); err == nil {
		return day, nil
	}
	return time.Parse(time.RFC3339, text)
}

// search calls use with pages until there were enough entries. A page may be empty and have a next one.
func search(ctx context.Context, c *client.V2, p v2.QueryAuditLogParams, most int, use func([]v2.AuditEntry) error) error {
	for {
		p.Limit = new(min(100, most))
		page, err := c.QueryAuditLog(ctx, &p)
		if err != nil {
			return fmt.Errorf("searching the audit log: %w", err)
		}
		if err := use(page.Entries); err != nil {
			return err
		}
		if most -= len(page.Entries); page.NextCursor == nil || most <= 0 {
			return nil
		}
		p.Cursor = page.NextCursor
	}
}

func newTailCommand() *cobra.Command {
	var r command.Server
	var after *int64
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "tail",
		Short: "Print entries of your tenant as they are written",
		Long: `Print the entries of your tenant's part of the log as they are written, until it is
interrupted. It begins with the entry that it leaves itself, or behind --after. With
--json each line is an entry. The API key needs the scope audit:read.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := r.Client()
			if err != nil {
				return err
			}
			out := cmd.OutOrStdout()
			lines := json.NewEncoder(out)
			err = tail(cmd.Context(), c, &v2.TailAuditLogParams{After: after}, func(e *v2.AuditEntry) error {
				if asJSON {
					return lines.Encode(e)
				}
				cells := names(nil).cells(e)
				_, err := fmt.Fprintf(out, "%8s  %s  %-28s %-8s %s %s\n", cells[0], cells[1], cells[2], cells[3], cells[4], cells[5])
				return err
			})
			if cmd.Context().Err() != nil {
				return nil // interrupted, as is usual
			}
			return err
		},
	}
	r.RegisterConnection(cmd)
	command.Int(cmd, &after, "after", 0, audit.MaxInteger, "begin with the first entry behind this sequence")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print each entry as a line of JSON")
	return cmd
}

// tail calls use with each entry. When the server ends a tail, the next one goes on with the entry
// behind the last.
func tail(ctx context.Context, c *client.V2, p *v2.TailAuditLogParams, use func(*v2.AuditEntry) error) error {
	for {
		t, err := c.TailAuditLog(ctx, p)
		if err != nil {
			return fmt.Errorf("following the audit log: %w", err)
		}
		for {
			var e *v2.AuditEntry
			if e, err = t.Next(); err == nil {
				p.LastEventID = &e.Sequence
				err = use(e)
			}
			if err != nil {
				break
			}
		}
		_ = t.Close()
		if !errors.Is(err, io.EOF) {
			return err
		}
	}
}

// eventTypes returns the types of events that the contract lists.
func eventTypes() (all []string) {
	_, list, _ := strings.Cut(openapi.V2(), "\n    EventType:\n")
	_, list, _ = strings.Cut(list, "      enum:\n")
	for line := range strings.Lines(list) {
		name, isItem := strings.CutPrefix(line, "        - ")
		if !isItem {
			break
		}
		name, _, _ = strings.Cut(strings.TrimSpace(name), " ")
		all = append(all, name)
	}
	return all
}
