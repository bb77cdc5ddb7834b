package auditlog

import (
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

// mostIDs is how many names one request finds.
const mostIDs = 200

// names maps the ids in entries to the names of what they are of. It lacks what has none any more.
type names map[string]v2.Name

// findNames asks what the actors and resources of entries are called.
func findNames(ctx context.Context, c *client.V2, entries []v2.AuditEntry) (names, error) {
	var ids []string
	for _, e := range entries {
		for _, id := range []string{e.Actor.Id, e.Resource.Id} {
			if id != "" {
				ids = append(ids, id)
			}
		}
	}
	slices.Sort(ids)
	all := make(names)
	for part := range slices.Chunk(slices.Compact(ids), mostIDs) {
		found, err := c.FindNames(ctx, part...)
		if err != nil {
			return nil, fmt.Errorf("finding out names, for which the API key needs the scope audit:names: %w", err)
		}
		for _, n := range found.Names {
			all[n.Id] = n
		}
	}
	return all, nil
}

// cells returns those of an entry in a table for people.
func (n names) cells(e *v2.AuditEntry) []string {
	name := func(r v2.AuditReference) string {
		switch name, ok := n[r.Id]; {
		case ok && name.Gone != nil:
			return command.Printable(name.Name) + " (gone)"
		case ok && name.PastNames != nil:
			return command.Printable(name.Name) + " (was " + command.Printable((*name.PastNames)[0]) + ")"
		case ok:
			return command.Printable(name.Name)
		case r.Id == "":
			return r.Type
		}
		return command.Printable(r.Id)
	}
	return []string{
		strconv.FormatInt(e.Sequence, 10), e.Timestamp.UTC().Format(time.DateTime), string(e.EventType), string(e.Outcome), name(e.Actor), name(e.Resource),
	}
}

// writeLines writes entries as lines of JSON, as the server sent them.
func writeLines(out io.Writer, entries []v2.AuditEntry) error {
	lines := json.NewEncoder(out)
	for _, e := range entries {
		if err := lines.Encode(e); err != nil {
			return err
		}
	}
	return nil
}

var csvColumns = []string{
	"sequence", "timestamp", "event_type", "outcome", "reason", "actor_type", "actor_id", "actor_name", "resource_type", "resource_id", "resource_name",
	"source_ip", "request_id", "attributes",
}

// newTable begins a table of RFC 4180 with its heading.
func newTable(out io.Writer) *csv.Writer {
	w := csv.NewWriter(out)
	_ = w.Write(csvColumns) // Flush says what failed
	return w
}

// writeCSV writes entries as rows of a table. Names are empty if nobody asked for them.
func (n names) writeCSV(w *csv.Writer, entries []v2.AuditEntry) error {
	for _, e := range entries {
		attributes, err := json.Marshal(e.Attributes)
		if err != nil {
			return err
		}
		row := []string{
			strconv.FormatInt(e.Sequence, 10), e.Timestamp.UTC().Format(time.RFC3339Nano), string(e.EventType), string(e.Outcome), e.Attributes["reason"],
			e.Actor.Type, e.Actor.Id, n[e.Actor.Id].Name, e.Resource.Type, e.Resource.Id, n[e.Resource.Id].Name, e.SourceIp, e.RequestId, string(attributes),
		}
		for i := range row {
			row[i] = inert(row[i])
		}
		_ = w.Write(row)
	}
	w.Flush()
	return w.Error()
}

// inert returns a cell that no spreadsheet takes for a formula: names are chosen by whoever makes a
// credential.
func inert(cell string) string {
	if cell != "" && strings.ContainsRune("=+-@\t\r", rune(cell[0])) {
		return "'" + cell
	}
	return cell
}
