package report

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/latticekeep/latticekeep/internal/compliance"
)

// scope writes what the report is and what it cannot be.
func (s *sheet) scope() {
	c := s.d.Assessment.Coverage
	s.section("scope", "Scope and limits", 110)
	s.heading("What this report is")
	s.flow(body, "It shows what the audit log is evidence for, control by control, for one tenant and as of one entry of the log, the head. A program wrote it "+
		"from the log and the name of the organisation; nobody edited it, and the same head and name give the same report, byte for byte. Whatever it says is followed by the entries that "+
		"it was judged by, as sequence and hash.")
	if s.d.Stated != "" {
		s.flow(body, "Who asked for the report stated whom it was made for. The log does not know that name, and nothing in the report was judged by it.")
	}
	if !s.d.From.IsZero() {
		s.flow(body, "The period on the cover is the one that was asked for. The score and the results are those of the head, at its end, and not of the period: each probe looks "+
			"back over a window of its own, which stands beside its result and can begin before the period. The history of the score begins with the period.")
	}
	s.flow(body, "The titles of controls are our own short ones. What counts is the text of the framework, which is not repeated here.")

	s.heading("What a signed log can show")
	s.bullets(
		"That an event was recorded: which one, when by the clock of the service, by which actor (a pseudonymous id), and how it ended.",
		"That no entry up to the head was changed, removed or put in between since it was written. Each holds the SHA3-256 hash of the one before it and "+
			"is covered by a signature with ML-DSA-65; a tree over all of them, with its own signed checkpoints, shows that the log only grew.",
		"That a control operated: how often, over which time, and with which failures.",
	)
	s.heading("What it cannot show")
	s.bullets(
		"That a control is designed well, or that it fits the risk. A log proves that something worked, not that it was the right thing.",
		"Anything outside the service: people, premises, contracts, suppliers, networks, and every other system.",
		"That what is not in the log did not happen. And who holds both the signing key and the database can write another log from there on: "+
			"only a checkpoint that was kept elsewhere shows it.",
		"Whose log it is. Compare the fingerprint with one that came to you another way.",
	)
	s.heading("What lies outside")
	s.flow(body, fmt.Sprintf("The catalogue lists %s of %s. The log has evidence for %d of them; %s by a person, and %s listed as manual. "+
		"A framework asks for more than a catalogue of this service lists: most of it lies outside.",
		plural(c.Controls, "control"), name(s.d), c.Evidenced, judgedByPerson(c.Controls-c.Evidenced), areIs(c.Controls-c.Evidenced)))
	if s.d.Limits != "" {
		s.flow(body, sentence(s.d.Limits))
	}
	s.heading("Who judges")
	s.flow(body, "Whoever relies on this report: an auditor, a customer, a supervisor. Pass and fail are the words of a probe about the entries it read. Whether that "+
		"meets a requirement, and whether the sample and the window are enough, is not for a program to say.")
}

// meanings explains the results.
func (s *sheet) meanings() {
	row := func(r compliance.Result, meaning string) []cell { return []cell{{result: r}, {text: meaning}} }
	t := wide(column{heading: "Result", width: 28, style: small}, column{heading: "Meaning", style: small})
	t.keep, t.pad = true, 1.1
	s.table(t, [][]cell{
		row(compliance.Pass, "At least one probe of the control found what it looks for, and none found the opposite."),
		row(compliance.Fail, "A probe found the opposite, or what had to be there by now is not."),
		row(compliance.NoData, "The log holds nothing to judge by yet. Such a control is not scored."),
		row(compliance.NotApplicable, "What the control is about does not occur in this deployment. Such a control is not scored."),
		row(compliance.Manual, "A person judges it, outside the service. Nothing is said about it here."),
	})
	s.flow(small, "The score is the weight of the controls that passed, in percent of the weight of those that passed or failed. Coverage is how many of the controls "+
		"listed the log has evidence for at all. The proof says whether the chain was verified; when it does not hold, the score is withheld, and when its verification is disabled, a probe fails. "+
		"The three are never made one number.")
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return strconv.Itoa(n) + " " + what + "s"
}

func judgedByPerson(n int) string {
	if n == 1 {
		return "1 is judged"
	}
	return strconv.Itoa(n) + " are judged"
}

func areIs(n int) string {
	if n == 1 {
		return "is"
	}
	return "are"
}

// manual lists the controls that a person judges.
func (s *sheet) manual() {
	_, manual := split(s.d.Assessment.Controls)
	s.section("manual", "Manual controls", 60)
	if len(manual) == 0 {
		s.flow(body, "The catalogue lists none. That does not mean that there are none in the framework.")
		return
	}
	s.flow(body, "These controls of the catalogue are judged by a person, from evidence that the service does not have. They are listed so that nobody takes "+
		"their absence for an answer, and they are not scored. The last column is for the conclusion of whoever judges.")
	for _, g := range grouped(s.d, manual) {
		if g.profile != "" {
			s.need(30)
			s.put(left, s.y, strong.in(navy), profile(g.profile))
			s.y += strong.line() + 1.5
		}
		idWidth := 18.0
		for _, c := range g.controls {
			idWidth = min(44, max(idWidth, s.measure(strong.at(8), c.ID)+2))
		}
		rows := make([][]cell, len(g.controls))
		for i, c := range g.controls {
			rows[i] = cells(c.ID, c.Title, strings.Join(c.Related, ", "), "")
		}
		s.table(wide(
			column{heading: "Control", width: idWidth, style: strong.at(8)},
			column{heading: "Our title", style: small},
			column{heading: "Relates to 800-53", width: 34, style: faint},
			column{heading: "Conclusion, by whom, when", width: 50, style: small}), rows)
	}
}

// head writes exactly which log, and how much of it, the report covers.
func (s *sheet) head() {
	a := s.d.Assessment
	s.section("head", "Head of the chain", 220)
	s.flow(body, "The head is the newest entry that was looked at. Its hash covers that entry and, through the links, every entry before it.")
	s.facts(left, width, 40, mono.at(7.8),
		"Sequence", strconv.FormatUint(a.Head.Sequence, 10),
		"Hash", a.Head.Hash,
		"Recorded", a.Head.Time.UTC().Format("2006-01-02T15:04:05.000000Z"),
		"Tenant", string(s.d.Tenant),
		"Chain", s.d.ChainID,
		"Fingerprint", s.d.Fingerprint,
		"Key", s.d.KeyID,
		"Proof", s.proofText())
	if s.d.Checkpoint != "" {
		s.heading("Checkpoint at the head")
		s.flow(body, "The text that a checkpoint of the log at this entry has: origin, size and root of the RFC 6962 tree, and the entry itself. A signed note with this text is "+
			"the signature of the log under all that is before it.")
		s.code(mono.at(7.8), strings.TrimRight(s.d.Checkpoint, "\n"))
	}
	if s.d.PublicKey != "" {
		s.heading("Public key of the log")
		s.flow(body, "ML-DSA-65 (FIPS 204), base64. Take it from here only to compare it with the one that came to you another way.")
		s.code(mono.at(6.2), s.d.PublicKey)
	}
}

func (s *sheet) proofText() string {
	a := s.d.Assessment
	if a.Proof.Status == compliance.Disabled {
		return "disabled: nothing verified the whole chain"
	}
	return fmt.Sprintf("%s up to sequence %d", a.Proof.Status, verifiedTo(a))
}

// verify writes how to check the report without trusting it.
func (s *sheet) verify() {
	s.section("verify", "How to verify this report", 60)
	s.flow(body, "None of this needs the service that wrote the report, nor trust in who runs it.")
	steps := []struct{ heading, text, code string }{
		{"Compare the fingerprint", "It says whose log it is: the hash of the chain's id and its public key. Compare it with the one that you noted when the log began, or that its owner gave you " +
			"another way. Without that, everything below is consistent with itself and no more.", ""},
		{"Verify the log", "Take an export of the log and let the command recompute every hash, link, signature and the tree. With a checkpoint that you kept, it also proves that the log still holds " +
			"what it held then.", "latticekeep audit verify --file export.jsonl --fingerprint " + s.d.Fingerprint},
		{"Find the head in it", "The entry of the head's sequence must have the head's hash, and the tree of the size in the checkpoint must have its root. Copy the six lines of the checkpoint above into a file, and the " +
			"command does it, with this report or with any later export.", "latticekeep audit verify --file export.jsonl --since checkpoint.txt"},
		{"Compute the results again", "They follow from the export alone. The same head gives the same results.", s.d.Command},
		{"Look up citations", "Each names an entry by its sequence. The SHA3-256 of its canonical form, without hash and signature, must be the hash beside it.", ""},
		{"Check the signature of this file", "Beside it lies a detached signature, the file's name with .sig after it: 3309 bytes, ML-DSA-65 by the identity key of the deployment, with the " +
			"context latticekeep/report/v1, over the bytes of this file.", ""},
	}
	for i, step := range steps {
		s.need(26)
		s.fill(navy)
		s.f.Circle(left+2.6, s.y+2.4, 2.6, "F")
		s.centred(left+2.6, s.y+2.4-strong.at(8).line()/2, strong.at(8).in(white), strconv.Itoa(i+1))
		s.put(left+8, s.y, strong, step.heading)
		s.y += strong.line() + 0.4
		s.flowIn(left+8, width-8, body, step.text)
		if step.code != "" {
			s.code(mono.at(8), step.code)
		}
		s.y += 1
	}
}

// glossary explains the terms.
func (s *sheet) glossary() {
	s.section("glossary", "Glossary", 60)
	row := func(word, meaning string) []cell { return cells(word, meaning) }
	s.table(wide(column{heading: "Word", width: 32, style: strong.at(8)}, column{heading: "Meaning", style: small}), [][]cell{
		row("Audit log", "The record of what was done and refused in the service, one entry after the other, of all tenants in one chain. A report reads those of one tenant."),
		row("Chain", "The entries of the log, each with the hash of the one before."),
		row("Checkpoint", "A signed statement of how far the log goes: size and root of a tree over all entries, and the newest of them."),
		row("Coverage", "How many of the controls listed the log has evidence for."),
		row("Entry", "One record of the log. Its actor is a pseudonymous id, and it holds no secret."),
		row("Fingerprint", "Hash of the chain's id and its public key. It names the log."),
		row("Hash", "SHA3-256 of an entry, 64 hexadecimal digits."),
		row("Head", "The entry as of which is judged. Time, too, stands still there: what was due later is not late."),
		row("Manual", "Of a control: a person judges it, outside the service."),
		row("Probe", "A small program that reads entries, or the state of the deployment as an entry recorded it, and says what they are evidence for."),
		row("Proof", "Whether the chain was verified: hashes, links, signatures and tree."),
		row("Sample", "How many things a probe looked at."),
		row("Sequence", "The place of an entry in the chain, from 1."),
		row("Window", "How far back from the head a probe looks."),
		row("800-53", "NIST Special Publication 800-53, revision 5: the catalogue of controls that others are mapped to. \u201cRelates to\u201d says that the two are about the same thing, and no more."),
	})
}

// noData writes that the tenant has not used the vault.
func (s *sheet) noData() {
	s.callout(colours[compliance.NoData], "There is no data", "The log holds no use of the vault by this tenant: no credential, no key, nothing encrypted and nothing signed. "+
		"What could be judged is the state of the deployment and the tenant's accounts.")
}

// withheld writes why there is no score.
func (s *sheet) withheld(consequence string) {
	a := s.d.Assessment
	if !withheld(a) { // nothing could be judged
		s.callout(colours[compliance.NoData], "There is no score", sentence(a.Reason))
		return
	}
	s.callout(colours[compliance.Fail], "The score is withheld", sentence(a.Reason)+consequence)
}

// unwatched writes that the chain was not verified, if verification is disabled.
func (s *sheet) unwatched() {
	if s.d.Assessment.Proof.Status == compliance.Disabled {
		s.callout(colours[compliance.NoData], "The chain was not verified", unwatched)
	}
}
