package report

import (
	"crypto/sha3"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"strings"
	"time"

	"github.com/latticekeep/latticekeep/internal/compliance"
)

// headTime is the time of the head entry of these tests' documents.
var headTime = time.Date(2026, 11, 21, 10, 0, 0, 123456000, time.UTC)

// hashOf returns a substitute for the hash of an entry.
func hashOf(sequence uint64) string {
	h := sha3.Sum256(fmt.Appendf(nil, "entry %d", sequence))
	return hex.EncodeToString(h[:])
}

func refs2(sequences ...uint64) []compliance.Reference {
	out := []compliance.Reference{}
	for _, s := range sequences {
		out = append(out, compliance.Reference{
			Sequence: s, Hash: hashOf(s), Event: "CREDENTIAL_UNSEALED", Actor: "api_key key_mfrggzdfmztwq2lknnwg23tpoa", Time: headTime.Add(-time.Duration(s) * time.Minute),
		})
	}
	return out
}

func probe(name, title string, r compliance.Result, sample, days int, detail string, evidence ...uint64) compliance.ProbeResult {
	return compliance.ProbeResult{
		Name: name, Title: title, Result: r, Sample: sample, WindowDays: days, Detail: detail, Evidence: refs2(evidence...),
	}
}

func control(id, title string, r compliance.Result, related string, probes ...compliance.ProbeResult) compliance.ControlResult {
	return compliance.ControlResult{ID: id, Title: title, Result: r, Weight: 1, Related: strings.Fields(related), Probes: probes}
}

// Probes that several controls of the documents share.
var (
	decisions = probe("access_decisions", "Access is decided and recorded", compliance.Pass, 1842, 90,
		"1842 decisions were recorded, 37 of them refusals", 3120, 3377, 3604, 3981, 4187)
	suites = probe("suites", "Strong algorithms are used", compliance.Pass, 7, 0,
		"the deployment uses ML-KEM-768, ML-DSA-65, AES-256-GCM, HKDF-SHA-512, HMAC-SHA-512, SHA3-256 and argon2id", 4205)
	custody = probe("custody", "Keys are kept by a key management service", compliance.Pass, 1, 0,
		"tenant keys are wrapped by a key management service", 4205)
	rotation = probe("rotation_overdue", "Credentials are rotated before they expire", compliance.Fail, 48, 90,
		"3 of 48 credentials with a lifetime were expired or overdue for rotation", 2977, 3012, 3340)
	unused = probe("unused_privileges", "Granted privileges are used", compliance.Pass, 9, 90,
		"9 of 9 live API keys were used within the window", 3377, 3981)
	logins = probe("failed_logins", "Failed log-ins are reacted to", compliance.Pass, 21, 30,
		"21 failed log-ins, and each series of five or more ended in a lockout", 3844, 3849)
	integrity = probe("chain_verified", "The log is verified all the time", compliance.Pass, 1, 0,
		"the whole chain is verified in the background every 24 hours, and the newest checkpoint is kept outside the database", 4205)
	backups  = probe("backup_age", "Backups are recent", compliance.NoData, 0, 0, "no backup was recorded yet")
	disposal = probe("deletion", "What is deleted is gone", compliance.Pass, 14, 365,
		"14 credentials were deleted, and none was read afterwards", 1203, 2210, 3340)
)

// soc2 is an ordinary document, like the sample in the documentation.
func soc2() compliance.Document {
	score := 85.7
	controls := []compliance.ControlResult{
		control("CC4.1", "Controls are evaluated all the time", compliance.Pass, "CA-7", integrity),
		control("CC6.1", "Access to protected assets is decided, and they are encrypted", compliance.Pass, "AC-3 SC-13 SC-28 SC-28(1)", decisions, suites, custody),
		control("CC6.2", "Identities are registered before they have access", compliance.Pass, "AC-2 IA-5",
			probe("registration", "Identities are made by somebody with the right to", compliance.Pass, 12, 365, "12 identities were made, each by a recorded actor", 17, 402, 1877)),
		control("CC6.3", "Privileges are the least that are needed, and are taken back", compliance.Pass, "AC-2 AC-6 AC-6(9)", unused),
		control("CC6.6", "The outer boundary is guarded", compliance.Pass, "AC-3 SC-8", logins),
		control("CC6.7", "Data is protected while it moves", compliance.Pass, "SC-8(1)",
			probe("transport", "Transport is quantum-safe", compliance.Pass, 1, 0, "TLS 1.3 with X25519MLKEM768 is offered first", 4205)),
		control("CC7.1", "Changes of configuration and new weaknesses are noticed", compliance.Pass, "CM-3 CM-6", suites),
		control("CC7.2", "The system is watched for what is out of the ordinary", compliance.Pass, "AU-6 SI-4", logins, integrity),
		control("CC7.3", "Events are judged", compliance.Manual, "IR-5"),
		control("CC7.4", "Incidents are answered", compliance.Fail, "IR-5 IA-5(1)", rotation),
		control("CC8.1", "Changes are controlled", compliance.Manual, "CM-3"),
		control("C1.1", "Confidential data is identified and kept", compliance.Pass, "SC-28(1)", custody),
		control("C1.2", "Confidential data is disposed of", compliance.Pass, "MP-6", disposal),
		control("A1.2", "Recovery is possible", compliance.NoData, "CP-9(8)", backups),
	}
	controls[9].Weight = 2
	return document(compliance.SOC2, "SOC 2", "Trust Services Criteria 2017, with the points of focus revised in 2022", &score, controls)
}

// document returns a document with the controls as of [headTime].
func document(f compliance.Framework, name, version string, score *float64, controls []compliance.ControlResult) compliance.Document {
	const head = 4211
	evidenced := 0
	for _, c := range controls {
		if c.Result != compliance.Manual {
			evidenced++
		}
	}
	percent := 0.0
	if len(controls) > 0 {
		percent = float64(evidenced*1000/len(controls)) / 10
	}
	key := make([]byte, 1952)
	for i := range key {
		key[i] = hashOf(uint64(i))[0]
	}
	d := compliance.Document{
		Tenant: "ten_mfrggzdfmztwq2lknnwg23tpoa", Subject: compliance.Subject{Organisation: "Example Ltd"},
		Assessment: compliance.Assessment{
			Framework: f, Version: version, Score: score,
			Coverage: compliance.Coverage{Controls: len(controls), Evidenced: evidenced, Percent: percent},
			Proof:    compliance.Proof{Status: compliance.Verified, VerifiedTo: head, Hash: hashOf(head), At: headTime.Add(time.Hour)},
			Head:     compliance.Head{Sequence: head, Hash: hashOf(head), Time: headTime},
			Controls: controls,
		},
		Name:        name,
		Limits:      "The catalogue looks at what a vault sees: credentials, keys, sessions and its own log. It does not look at organisation, staff, premises or suppliers",
		ChainID:     "chain_mfrggzdfmztwq2lknnwg23tpoa",
		Fingerprint: hashOf(1),
		KeyID:       hashOf(2),
		PublicKey:   base64.StdEncoding.EncodeToString(key),
		Checkpoint: fmt.Sprintf("latticekeep.dev/log/chain_mfrggzdfmztwq2lknnwg23tpoa/1\n%d\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\nsequence %d\nhash %s\ntime 2026-11-21T10:00:00.123456Z\n",
			head, head, hashOf(head)),
		Activity: []compliance.Activity{
			{Event: "", Count: 2304, First: refs2(9)[0], Last: refs2(head)[0]},
			{Event: "CREDENTIAL_UNSEALED", Count: 1650, First: refs2(31)[0], Last: refs2(4187)[0]},
			{Event: "CREDENTIAL_CREATED", Count: 62, First: refs2(30)[0], Last: refs2(4101)[0]},
			{Event: "LOGIN_FAILED", Count: 21, First: refs2(77)[0], Last: refs2(3849)[0]},
			{Event: "TENANT_REGISTERED", Count: 1, First: refs2(9)[0], Last: refs2(9)[0]},
		},
		Command: "latticekeep compliance score --framework " + string(f) + " --tenant ten_mfrggzdfmztwq2lknnwg23tpoa --head 4211 --file export.jsonl",
		Program: "latticekeep 0.5.0",
	}
	for i := range 30 {
		day := headTime.AddDate(0, 0, i-30)
		s := 71.4
		switch {
		case i > 20:
			s = 85.7
		case i > 12:
			s = 92.9
		case i > 4:
			s = 78.6
		}
		d.History = append(d.History, compliance.DayScore{Date: day.Format(time.DateOnly), Score: s, Sequence: uint64(1000 + 100*i)})
	}
	return d
}

// fedramp has profiles, ids of many forms and a bad score.
func fedramp() compliance.Document {
	score := 57.1
	with := func(profile string, c compliance.ControlResult) compliance.ControlResult {
		c.Profile = profile
		return c
	}
	d := document(compliance.FedRAMP, "FedRAMP", "Rev. 5 Moderate and 20x (Consolidated Rules 2026), classes B and C", &score, []compliance.ControlResult{
		with("rev5", control("AC-2(4)", "Actions on accounts are recorded", compliance.Pass, "AC-2(4)", decisions)),
		with("rev5", control("AU-9(4)", "Few may read the log", compliance.Pass, "AU-9(4)", unused)),
		with("rev5", control("IA-5(6)", "Secrets are protected as what they open", compliance.Fail, "IA-5(6)", rotation, custody)),
		with("rev5", control("SC-13", "Cryptography is of an approved kind", compliance.Manual, "SC-13")),
		with("20x", control("KSI-SVC-ASM", "Secrets, keys and certificates are managed and rotated by machine", compliance.Fail, "IA-5(6) SC-12", rotation, suites)),
		with("20x", control("KSI-MLA-OSM", "Logging is central and resists tampering", compliance.Pass, "AU-9(3)", integrity)),
		with("20x", control("KSI-SVC-VRI", "Integrity is validated by cryptography", compliance.Pass, "SI-7(1)", integrity)),
		with("20x", control("KSI-CMT-LMC", "Changes are logged", compliance.NoData, "CM-3",
			probe("changes", "Changes of sealed resources are recorded", compliance.NoData, 0, 90, "no change was recorded within the window"))),
		with("20x", control("CMU-CSO-CMD", "Modules are documented", compliance.Manual, "SC-13")),
		with("20x", control("KSI-IAM-SNU", "Machines are authenticated", compliance.NotApplicable, "IA-3",
			probe("machines", "Service accounts are authenticated", compliance.NotApplicable, 0, 90, "no service account is registered"))),
	})
	d.Profiles = []string{"rev5", "20x"}
	return d
}

// disabled is a document about a log that nothing verifies.
func disabled() compliance.Document {
	d := fedramp()
	d.Assessment.Proof = compliance.Proof{Status: compliance.Disabled}
	return d
}

// broken is a document about a log whose chain does not verify.
func broken() compliance.Document {
	d := soc2()
	d.Assessment.Score = nil
	d.Assessment.Reason = "the chain does not verify: the first bad entry is 4007"
	d.Assessment.Proof = compliance.Proof{Status: compliance.Broken, VerifiedTo: 4006, Hash: hashOf(4006)}
	return d
}

// empty is a document about a tenant that has done nothing yet.
func empty() compliance.Document {
	score := 100.0
	d := document(compliance.GDPR, "GDPR", "Regulation (EU) 2016/679", &score, []compliance.ControlResult{
		control("5(1)(e)", "Data is kept no longer than it is needed", compliance.NoData, "SI-12",
			probe("deletion", "What is deleted is gone", compliance.NoData, 0, 365, "nothing was deleted within the window")),
		control("32(1)(a)", "Data is encrypted", compliance.Pass, "SC-28(1)", custody),
		control("32(1)(c)", "Availability can be restored", compliance.NoData, "CP-9", backups),
		control("33(5)", "Breaches are documented", compliance.Manual, "IR-5"),
	})
	d.History = nil
	d.Activity = []compliance.Activity{
		{Event: "", Count: 1, First: refs2(4211)[0], Last: refs2(4211)[0]},
		{Event: "COMPLIANCE_ASSESSED", Count: 1, First: refs2(4211)[0], Last: refs2(4211)[0]},
	}
	return d
}

// huge has more and longer elements of every kind than any catalogue, and text that is difficult
// for fonts and PDF writers.
func huge() compliance.Document {
	score := 33.3
	var controls []compliance.ControlResult
	results := []compliance.Result{compliance.Pass, compliance.Fail, compliance.NoData, compliance.NotApplicable, compliance.Manual}
	for i := range 60 {
		c := control(fmt.Sprintf("164.308(a)(%d)(ii)(D)", i), strings.Repeat("Übergroße Anforderung – žluťoučký кирилица ", i%4+1), results[i%5],
			strings.Repeat("AC-6(9) ", i%30+1))
		for j := range i % 4 {
			p := probe(fmt.Sprintf("probe_%d", j), strings.Repeat("A title that goes on and on ", j*2+1), results[j], i*j, j*365, strings.Repeat("a detail of many words ", 1+i*j))
			for k := range uint64(i * j % 50) {
				p.Evidence = append(p.Evidence, compliance.Reference{
					Sequence: 9007199254740991 - k, Hash: hashOf(k), Event: "PASSWORD_RESET_REQUESTED", Actor: "service_account " + strings.Repeat("0123456789ab", 3), Time: headTime,
				})
			}
			c.Probes = append(c.Probes, p)
		}
		controls = append(controls, c)
	}
	controls[3].Title = strings.Repeat("unbrokenverylongword", 40)
	controls[4].ID = strings.Repeat("LONGID-", 12)
	controls[7].Probes[0].Detail = strings.Repeat("a detail that is longer than a page ", 400)
	controls[9].Title = "not UTF-8 \xff\xfe, beyond the plane 🔐, control \x00\x1b, zero width \u200b, wide 漢字"
	controls[6].ID = strings.Repeat("LONGER-ID-", 14)
	controls[6].Title = strings.Repeat("A title that is longer than a page. ", 150)
	controls[14].Title = strings.Repeat("A manual control with a title longer than a page. ", 150)
	d := document(compliance.HIPAA, "HIPAA Security Rule with a name that is longer than any cover was made for", strings.Repeat("45 CFR Part 164 Subpart C ", 8), &score, controls)
	d.Tenant = "ten_" + "mfrggzdfmztwq2lknnwg23tpoa"
	for i := range 700 {
		d.History = append(d.History, compliance.DayScore{Date: headTime.AddDate(0, 0, i).Format(time.DateOnly), Score: float64(i*37%101) * 0.99, Sequence: uint64(i)})
	}
	return d
}
