package diagnosis

import (
	"slices"

	"github.com/latticekeep/latticekeep/internal/buildinfo"
)

// Part is what a line is about. The words are part of the JSON that scripts read.
type Part string

// The parts.
const (
	Configuration Part = "configuration"
	Memory        Part = "memory"
	Disk          Part = "disk"
	Files         Part = "files"
	Store         Part = "store"
	PostgreSQL    Part = "postgresql"
	Replicas      Part = "replicas"
	Clock         Part = "clock"
	KMS           Part = "kms"
	Rows          Part = "rows"
	Chain         Part = "chain"
	Anchors       Part = "anchors"
	Archive       Part = "archive"
	Backups       Part = "backups"
	Certificates  Part = "certificates"
	Mail          Part = "mail"
)

// Entry describes a part, as docs/guides/monitor.md does.
type Entry struct {
	Part  Part
	Looks string // what is looked at
	page  string // page of the documentation, for lines that are not well
}

// Parts is the table of all parts, in the order of a report.
var Parts = []Entry{
	{Configuration, "the file, the environment and the flags, and that the settings go together", "reference/configuration.md"},
	{Memory, "the limit of the process's control group", "runbooks/server.md#latticekeepdown"},
	{Disk, "free room of the data directory, of `backup.scratch` and of folders that are buckets; whether the file system keeps a reserve", "runbooks/database.md#latticekeepdiskfilling"},
	{Files, "keys, tokens and passwords: readable, and by nobody else", "reference/configuration.md"},
	{Store, "it opens, its format, free pages, the mark of a restore or a migration", "runbooks/database.md"},
	{PostgreSQL, "it answers, its version, synchronous standbys, size, the connections in use", "runbooks/database.md#latticekeeppostgresdown"},
	{Replicas, "the formats that programs read which use the database now", "guides/upgrade.md"},
	{Clock, "this machine's clock against PostgreSQL's, and against the newest entry", "runbooks/server.md"},
	{KMS, "each key wraps and opens, or opens; the current one opens the deployment's own key", "runbooks/kms.md"},
	{Rows, "every stored row, or what the last scan of a running server found", "runbooks/audit-log.md#latticekeeprowsrefused"},
	{Chain, "the whole log, or how far a running server has verified it; the head", "runbooks/audit-log.md#latticekeeplogbroken"},
	{Anchors, "each place: reachable, and its checkpoint against the log", "runbooks/audit-log.md#latticekeeprollback"},
	{Archive, "it can be read, and has its oldest segment; entries that should be there", "runbooks/audit-log.md#latticekeeparchiveunreadable"},
	{Backups, "the bucket, the room to verify, the age of the newest backup and of the newest verified one", "runbooks/backups.md"},
	{Certificates, "they parse, fit their keys and chains, name `publicURL`, and last", "runbooks/certificates.md"},
	{Mail, "the mail server accepts connections; e-mails that wait", "runbooks/mail.md"},
}

// place returns the position of a part in the table.
func (p Part) place() int {
	return slices.IndexFunc(Parts, func(e Entry) bool { return e.Part == p })
}

// page returns the URL of the page about a part.
func (p Part) page() string {
	if at := p.place(); at >= 0 {
		return buildinfo.Documentation + Parts[at].page
	}
	return ""
}
