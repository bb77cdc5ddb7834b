// Package importer stores the secrets of other tools in the vault. A source lists what it has, and
// reads one secret at a time. The package reads it, compares it with what the vault has, and seals what
// is missing, all through REST: the server fetches nothing.
//
// An import needs no state of its own. A secret that the vault has under its name with equal values is
// left alone, so an import that was interrupted goes on when it is run again. Nothing that it prints
// has a value.
package importer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/progress"
)

// common is the help that all imports share.
const common = `

Try it with --dry-run first: it prints the names of what would be created, replaced or
refused. A credential that has the name and equal values already is left alone, so that
you run the same command again after an interruption. One with other values is refused,
or replaced with --replace. The API key needs vault:read beside vault:write, and each
comparison is a read in the audit log. No value is printed. The exit status is 1 if some
secret was refused.`

// secret is what a source has for one credential.
type secret struct {
	source string // where it stands, for messages
	name   string // the credential's
	read   func(context.Context) (map[string]string, error)
}

// given returns a read of what is known already.
func given(values map[string]string, err error) func(context.Context) (map[string]string, error) {
	return func(context.Context) (map[string]string, error) { return values, err }
}

// source lists the secrets of another tool. It may report some that it cannot read as secrets whose
// read fails.
type source func(context.Context) ([]secret, error)

// refused says why one secret is not imported, in text that is safe to print. The others still are.
type refused struct {
	rule   string
	status int // HTTP status that the source answered; 0: it gave the secret
}

// Error implements error.
func (r refused) Error() string { return r.rule }

func refuse(format string, args ...any) error { return refused{rule: fmt.Sprintf(format, args...)} }

// skipped says why there is nothing to import of one secret, which is no failure.
type skipped struct{ why string }

// Error implements error.
func (s skipped) Error() string { return s.why }

// options are the flags that all sources share.
type options struct {
	server         command.Server
	prefix         string
	credentialType string
	ttlDays        *int
	replace, dry   bool
}

// register defines the flags. The server's belong to the group.
func (o *options) register(cmd *cobra.Command) {
	o.server.RegisterConnection(cmd)
	f := cmd.Flags()
	f.StringVar(&o.prefix, "prefix", "", "path to put before each name, such as shop/prod")
	f.StringVar(&o.credentialType, "type", "imported", "credential type of new credentials, such as database")
	command.Int(cmd, &o.ttlDays, "ttl-days", 1, 3650, "days that what is stored lives, 1 to 3650 (default 90, or as before for what is replaced)")
	f.BoolVar(&o.replace, "replace", false, "replace the values of credentials that have other ones")
	f.BoolVar(&o.dry, "dry-run", false, "print what would be created, replaced or refused, and change nothing")
}

// run imports all that from lists.
func (o *options) run(cmd *cobra.Command, from source) error {
	if !typePattern.MatchString(o.credentialType) {
		return command.UsageError("--type takes 1 to 63 letters, digits and . _ -")
	}
	c, err := o.server.Client()
	if err != nil {
		return err
	}
	ctx := cmd.Context()
	secrets, err := from(ctx)
	if err != nil {
		return err
	}
	im := &importing{options: o, client: c, from: make(map[string]string)}
	if im.taken, err = credentials(ctx, c); err != nil {
		return fmt.Errorf("listing the credentials of the vault, which an import compares with (scopes vault:read and vault:write): %w", err)
	}
	p := progress.New(cmd.ErrOrStderr(), false)
	p.Expect(uint64(len(secrets)))
	for _, s := range secrets {
		if err = im.one(ctx, s); err != nil {
			break
		}
		p.AddOf("secrets")
	}
	p.EndOf("secrets")
	return errors.Join(im.report(cmd.OutOrStdout(), cmd.ErrOrStderr(), len(secrets), err), err)
}

var typePattern = regexp.MustCompile(`^[a-zA-Z0-9][-._a-zA-Z0-9]{0,62}$`)

// The outcomes for a secret, in the words of the report.
const (
	created   = "created"
	replaced  = "replaced"
	unchanged = "unchanged"
	failed    = "refused"
	left      = "skipped"
)

// importing is one run.
type importing struct {
	*options
	client *client.V2
	taken  map[string]v2.Credential // active credentials of the vault by name
	from   map[string]string        // source of each name that was seen
	done   []outcome
}

type outcome struct{ what, name, source, why string }

// one imports a secret, and notes what became of it. Its error ends the import.
func (im *importing) one(ctx context.Context, s secret) error {
	o := outcome{name: s.name, source: s.source}
	if im.prefix != "" {
		o.name = strings.Trim(im.prefix, "/") + "/" + s.name
	}
	var err error
	o.what, err = im.store(ctx, o, s.read)
	var rule refused
	var nothing skipped
	switch {
	case err == nil:
	case errors.As(err, &rule):
		o.what, o.why = failed, rule.rule
	case errors.As(err, &nothing):
		o.what, o.why = left, nothing.why
	default:
		return fmt.Errorf("%s: %w", command.Printable(s.source), err)
	}
	im.done = append(im.done, o)
	return nil
}

// store brings the vault to the values of a secret, or in a dry run only says how.
func (im *importing) store(ctx context.Context, o outcome, read func(context.Context) (map[string]string, error)) (string, error) {
	values, err := read(ctx)
	if err == nil {
		err = check(o.name, values)
	}
	if err != nil {
		return "", err
	}
	if other, seen := im.from[o.name]; seen {
		return "", refuse("%s has the same name", command.Printable(other))
	}
	im.from[o.name] = o.source
	old, taken := im.taken[o.name]
	if !taken && im.dry {
		return created, nil
	}
	if !taken {
		_, err := im.client.PutCredentialByName(ctx, o.name, v2.PutRequest{CredentialType: im.credentialType, Values: values, TtlDays: im.ttlDays}, client.IfNoneMatch())
		if !errors.Is(err, client.ErrPreconditionFailed) {
			return created, judge("sealing", err)
		}
		// Somebody else has stored it meanwhile, such as another import of the same.
		if im.taken, err = credentials(ctx, im.client); err != nil {
			return "", fmt.Errorf("listing the credentials of the vault: %w", err)
		}
		if old, taken = im.taken[o.name]; !taken {
			return "", refuse("somebody else stores and removes it at the same time: run the import again")
		}
	}
	return im.compare(ctx, old, values)
}

// compare brings a credential that is there to values, or in a dry run only says how.
func (im *importing) compare(ctx context.Context, old v2.Credential, values map[string]string) (string, error) {
	var tag string
	now, err := im.client.UnsealCredential(ctx, old.CredentialId, client.EntityTag(&tag))
	switch {
	case errors.Is(err, client.ErrForbidden):
		return "", refuse("the name is taken by %s, which this API key cannot read to compare", old.CredentialId)
	case err != nil:
		return "", judge("comparing", err)
	case now.BinaryValues != nil && len(*now.BinaryValues) > 0:
		return "", refuse("the name is taken by %s, which has values that are not text: an import cannot compare those", old.CredentialId)
	case maps.Equal(now.Values, values):
		return unchanged, nil
	case old.Owned:
		return "", refuse("%s has other values, and belongs to a Kubernetes object: change the object", old.CredentialId)
	case !im.replace:
		return "", refuse("%s has other values: store these with --replace", old.CredentialId)
	case im.dry:
		return replaced, nil
	}
	_, err = im.client.ReplaceCredential(ctx, old.CredentialId, v2.ReplaceRequest{Values: values, TtlDays: im.ttlDays}, client.IfMatch(tag))
	if errors.Is(err, client.ErrPreconditionFailed) {
		return "", refuse("%s was changed meanwhile: run the import again", old.CredentialId)
	}
	return replaced, judge("replacing", err)
}

// judge tells a refusal of one secret from a failure that all further ones would meet. The server's
// message never repeats the request.
func judge(doing string, err error) error {
	if errors.Is(err, client.ErrInvalid) || errors.Is(err, client.ErrForbidden) || errors.Is(err, client.ErrConflict) {
		return refuse("%s: %v", doing, err)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return nil
}

// credentials returns the active credentials that the caller may see, by name. Of several of one name
// it is the newest, which is also what the vault answers for the name.
func credentials(ctx context.Context, c *client.V2) (map[string]v2.Credential, error) {
	all := make(map[string]v2.Credential)
	p := &v2.ListCredentialsParams{Limit: new(100)}
	for {
		page, err := c.ListCredentials(ctx, p)
		if err != nil {
			return nil, err
		}
		for _, found := range page.Credentials {
			if other, ok := all[found.Name]; found.Status == v2.CredentialStatusActive && (!ok || found.CreatedAt.After(other.CreatedAt)) {
				all[found.Name] = found
			}
		}
		if p.Cursor = page.NextCursor; p.Cursor == nil || *p.Cursor == "" {
			return all, nil
		}
	}
}

// report prints what became of the secrets. Its error says that some are not in the vault; stopped is
// why the import ended early.
func (im *importing) report(out, note io.Writer, all int, stopped error) error {
	counts := make(map[string]int)
	for _, o := range im.done {
		counts[o.what]++
		switch {
		case o.what == failed || o.what == left:
			fmt.Fprintf(note, "%s: %s: %s\n", o.what, command.Printable(o.source), o.why)
		case im.dry:
			fmt.Fprintf(out, "%-9s  %s\n", o.what, command.Printable(o.name))
		}
	}
	text := fmt.Sprintf("created %d, replaced %d, unchanged %d, skipped %d, refused %d", counts[created], counts[replaced], counts[unchanged], counts[left], counts[failed])
	if im.dry {
		text = "dry run: " + text
	}
	fmt.Fprintln(out, text)
	switch {
	case stopped != nil:
		return fmt.Errorf("stopped at secret %d of %d; run the same command again, which goes on there", len(im.done)+1, all)
	case counts[failed] > 0:
		return fmt.Errorf("%d of %d secrets are refused; standard error names them", counts[failed], all)
	}
	return nil
}

// Bounds of the vault.
const (
	maxName   = 255
	maxValues = 64
	maxBytes  = 256 << 10
)

var keyPattern = regexp.MustCompile(`^[A-Za-z0-9._-]{1,253}$`)

// check applies the vault's rules, so that a dry run tells what the vault would refuse.
func check(name string, values map[string]string) error {
	if err := checkName(name); err != nil {
		return err
	}
	bytes := 0
	for _, key := range slices.Sorted(maps.Keys(values)) {
		bytes += len(key) + len(values[key])
		switch {
		case !keyPattern.MatchString(key):
			return refuse("the key %.100q is none: a key has 1 to 253 letters, digits and . _ -", key)
		case !utf8.ValidString(values[key]):
			return refuse("the value of %s is not UTF-8", key)
		}
	}
	switch {
	case len(values) == 0:
		return refuse("it has no values")
	case len(values) > maxValues:
		return refuse("it has %d values, and a credential at most %d: divide it", len(values), maxValues)
	case bytes > maxBytes:
		return refuse("its keys and values have %d bytes, and those of a credential at most %d", bytes, maxBytes)
	}
	return nil
}

// checkName refuses names that are no paths: others could not be given access to.
func checkName(name string) error {
	for segment := range strings.SplitSeq(name, "/") {
		if segment == "" || segment == "." || segment == ".." {
			return refuse("the name %.100q has an empty segment, or . or .. as one", name)
		}
	}
	if len(name) > maxName || !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) {
		return refuse("the name %.100q has more than %d bytes, or characters that are not printable", name, maxName)
	}
	return nil
}
