package vault

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/dotenv"
	"github.com/latticekeep/latticekeep/internal/fault"
	"github.com/latticekeep/latticekeep/internal/generate"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// defaultType is the type of credentials that are made without --type.
const defaultType = "generic"

// maxInput bounds a file or standard input, in bytes. The server takes less.
const maxInput = 1 << 20

// target says how values are stored.
type target struct {
	credentialType string
	ttlDays        *int
	neverExpires   bool
	keep           bool // values of other keys stay
}

func (t *target) register(cmd *cobra.Command) {
	cmd.Flags().StringVar(&t.credentialType, "type", "", "type of the credential (default the one that it has, or "+defaultType+")")
	command.Int(cmd, &t.ttlDays, "ttl-days", 1, 3650, "lifetime in days from now, 1 to 3650 (default 90, or as many as the credential had)")
	neverExpires(cmd, &t.neverExpires)
}

func neverExpires(cmd *cobra.Command, set *bool) {
	cmd.Flags().BoolVar(set, "never-expires", false, "no end of the lifetime, on a path where latticekeep settings allows it")
	cmd.MarkFlagsMutuallyExclusive("never-expires", "ttl-days")
}

// never returns what a request says of a lifetime without an end.
func never(set bool) *v2.NeverExpires {
	if !set {
		return nil
	}
	return &set
}

func (t *target) registerKeep(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&t.keep, "keep", false, "keep the values of keys that are not given")
}

// store makes the credential of a name, or gives it these values as its next version.
func (t *target) store(ctx context.Context, c *client.V2, name string, given values) (v2.Credential, error) {
	for range 3 {
		made, err := t.storeOnce(ctx, c, name, given)
		if !errors.Is(err, client.ErrPreconditionFailed) {
			return made, err
		}
	}
	return v2.Credential{}, &command.StatusError{Status: command.StatusRefused, Err: fmt.Errorf("%s is there and cannot be found: the API key needs the verb list on its path, "+
		"or somebody else stores and removes it at the same time", command.Printable(name))}
}

// storeOnce is store, and fails with [client.ErrPreconditionFailed] if there is a credential that it has not
// found.
func (t *target) storeOnce(ctx context.Context, c *client.V2, name string, given values) (v2.Credential, error) {
	byID := isID.MatchString(name)
	found := new(v2.Credential)
	var isNew []client.CallOption // keep also holds for a credential that somebody else makes meanwhile
	if t.keep {
		isNew = append(isNew, client.IfNoneMatch())
	}
	if t.keep || t.credentialType == "" || byID {
		credential, err := findNewest(ctx, c, name) // one in the trash only says which type it had
		if err != nil {
			return v2.Credential{}, err
		}
		if credential != nil {
			found = credential
		}
	}
	var answer *v2.CredentialAnswer
	var err error
	switch patches := t.keep && found.Status == v2.CredentialStatusActive; {
	case (patches || byID) && t.credentialType != "" && t.credentialType != found.CredentialType:
		return v2.Credential{}, command.UsageError(fmt.Sprintf("%s is of type %s, which stays: leave --type out", command.Printable(name), found.CredentialType))
	case patches:
		r := v2.PatchRequest{Values: make(map[string]*string), TtlDays: t.ttlDays, NeverExpires: never(t.neverExpires)}
		for key, value := range given {
			r.Values[key] = new(string(value))
		}
		answer, err = c.PatchCredential(ctx, found.CredentialId, r)
	case byID:
		answer, err = c.ReplaceCredential(ctx, name, v2.ReplaceRequest{Values: given.strings(), TtlDays: t.ttlDays, NeverExpires: never(t.neverExpires)})
	default:
		answer, err = c.PutCredentialByName(ctx, name, v2.PutRequest{
			CredentialType: cmp.Or(t.credentialType, found.CredentialType, defaultType), Values: given.strings(), TtlDays: t.ttlDays, NeverExpires: never(t.neverExpires),
		}, isNew...)
	}
	if err != nil {
		return v2.Credential{}, fmt.Errorf("storing %s: %w", command.Printable(name), err)
	}
	return credentialOf(answer), nil
}

// sources says where values come from.
type sources struct{ files, envFiles []string }

func newPutCommand() *cobra.Command {
	var r command.Server
	var f command.Format
	var t target
	var s sources
	cmd := &cobra.Command{
		Use:   "put NAME [KEY=-]...",
		Short: "Store a credential, or give one new values",
		Long: `Store values under a name. A credential of that name gets them as its next version,
in place of ALL that it had; --keep keeps those of other keys. The values that it had
are gone, unless latticekeep keep has the server keep earlier versions.

No value is an argument, because others can read the command lines of a machine.
They come from

  KEY=-              standard input; in a terminal it asks and does not show what
                     is typed. One line break at the end is left out
  --from-file        a file, whose bytes are the value
  --from-env-file    the KEY=VALUE lines of a .env file, - for standard input
  standard input     a JSON object of strings, if nothing else is given; what
                     latticekeep get -o json prints

The API key needs the scopes vault:read and vault:write.`,
		Example: `  latticekeep put db password=-
  openssl rand -hex 16 | latticekeep put db --keep password=-
  latticekeep put tls --type tls --from-file tls.crt --from-file key=tls.key`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return put(cmd, &r, &f, &t, &s, args)
		},
	}
	r.RegisterConnection(cmd)
	cmd.ValidArgsFunction = completeNames(&r)
	f.Register(cmd)
	t.register(cmd)
	t.registerKeep(cmd)
	cmd.Flags().StringArrayVar(&s.files, "from-file", nil, "file with a value, as FILE or KEY=FILE; may be repeated")
	cmd.Flags().StringArrayVar(&s.envFiles, "from-env-file", nil, "file of KEY=VALUE lines, - for standard input; may be repeated")
	return cmd
}

// put stores the values of s under the name args[0].
func put(cmd *cobra.Command, r *command.Server, f *command.Format, t *target, s *sources, args []string) error {
	if err := f.Check(); err != nil {
		return err
	}
	c, err := r.Client()
	if err != nil {
		return err
	}
	given, err := s.read(cmd, args[1:])
	defer given.zero()
	if err != nil {
		return err
	}
	made, err := t.store(cmd.Context(), c, args[0], given)
	if err != nil {
		return err
	}
	return f.Print(cmd.OutOrStdout(), made, func(out io.Writer) { printCredentials(out, made) })
}

// read returns the values that the command line names. No error quotes an argument that may be a
// value, or anything that is read.
func (s *sources) read(cmd *cobra.Command, args []string) (values, error) {
	all := make(values)
	add := func(key string, value secret.Bytes) error {
		if _, ok := all[key]; ok {
			value.Zero()
			return command.UsageError("the key " + command.Printable(key) + " is given twice")
		}
		all[key] = value
		if !utf8.Valid(value) {
			return command.UsageError("the value of " + command.Printable(key) + " is not text in UTF-8: encode it, for example in base64")
		}
		return nil
	}
	stdin := 0
	for _, arg := range args {
		key, value, _ := strings.Cut(arg, "=")
		if value != "-" || key == "" {
			return all, command.UsageError("an argument behind NAME is not KEY=-: values are no arguments, since others can read those; give them on standard input or by --from-file")
		}
		text, typed, err := command.Prompt(cmd, "Value of "+command.Printable(key))
		if !typed && err == nil {
			if stdin++; stdin == 1 {
				text, err = command.ReadAll(cmd.InOrStdin(), "standard input", maxInput)
				text = withoutLineBreak(text)
			}
		}
		if err == nil {
			err = add(key, text)
		}
		if err != nil {
			return all, err
		}
	}
	for _, file := range s.files {
		key, path, ok := strings.Cut(file, "=")
		if !ok {
			key, path = filepath.Base(file), file
		}
		text, err := command.ReadFile(path, maxInput)
		if err == nil {
			err = add(key, text)
		}
		if err != nil {
			return all, err
		}
	}
	for _, path := range s.envFiles {
		title := path
		var text secret.Bytes
		var err error
		if path == "-" {
			stdin++
			title = "standard input"
			text, err = command.ReadAll(cmd.InOrStdin(), title, maxInput)
		} else {
			text, err = command.ReadFile(path, maxInput)
		}
		if err != nil {
			return all, err
		}
		parsed, err := dotenv.Parse(text)
		text.Zero()
		if err != nil {
			return all, &command.StatusError{Status: command.StatusUsage, Err: fmt.Errorf("%s: %w", title, err)}
		}
		for _, v := range parsed {
			if err := add(v.Name, secret.Bytes(v.Value)); err != nil {
				return all, err
			}
		}
	}
	switch {
	case stdin > 1:
		return all, command.UsageError("standard input holds one value or one file: give the others by --from-file")
	case len(args)+len(s.files)+len(s.envFiles) > 0 && len(all) == 0:
		return all, command.UsageError("there are no values in what was given")
	case len(all) > 0:
		return all, nil
	}
	return all, readObject(cmd, add)
}

// readObject reads values from a JSON object of strings on standard input.
func readObject(cmd *cobra.Command, add func(string, secret.Bytes) error) error {
	if command.IsTerminal(cmd.InOrStdin()) {
		return command.UsageError("no values: give KEY=-, --from-file or --from-env-file, or a JSON object on standard input")
	}
	text, err := command.ReadAll(cmd.InOrStdin(), "standard input", maxInput)
	defer text.Zero()
	if err != nil {
		return err
	}
	var object map[string]*string
	if json.Unmarshal(text, &object) != nil || len(object) == 0 { // the decoder's words may quote a value
		return command.UsageError("standard input is not a JSON object of strings, such as {\"user\": \"app\"}: give that, or KEY=-, --from-file or --from-env-file")
	}
	for key, value := range object {
		if value == nil {
			return command.UsageError("the value of " + command.Printable(key) + " is null: give it text, or leave the key out")
		}
		if err := add(key, secret.Bytes(*value)); err != nil {
			return err
		}
	}
	return nil
}

func withoutLineBreak(text secret.Bytes) secret.Bytes {
	return bytes.TrimSuffix(bytes.TrimSuffix(text, []byte("\n")), []byte("\r"))
}

func newGenerateCommand() *cobra.Command {
	var r command.Server
	var f command.Format
	var t target
	var length *int
	var charset, algorithm string
	cmd := &cobra.Command{
		Use:   "generate NAME KEY",
		Short: "Put a random value or a key pair into a credential",
		Long: `Make a random value, or a key pair in PEM with its public key under KEY.pub, and store
it under KEY of the credential NAME. The values of other keys stay; a credential that
is not there is made. The value is not shown: latticekeep get does that.

The API key needs the scopes vault:read and vault:write.`,
		Example: `  latticekeep generate db password --length 40
  latticekeep generate signer key --key-pair ML-DSA-65`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.Check(); err != nil {
				return err
			}
			spec := generate.Spec{Key: args[1]}
			if algorithm != "" {
				spec.KeyPair = &generate.KeyPair{Algorithm: algorithm}
			} else {
				spec.Random = &generate.Random{Charset: charset}
				if length != nil {
					spec.Random.Length = *length
				}
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			made, err := generate.Values([]generate.Spec{spec})
			defer values(made).zero()
			if err != nil {
				return inFlags(err)
			}
			t.keep = true
			stored, err := t.store(cmd.Context(), c, args[0], made)
			if err != nil {
				return err
			}
			return f.Print(cmd.OutOrStdout(), stored, func(out io.Writer) { printCredentials(out, stored) })
		},
	}
	r.RegisterConnection(cmd)
	cmd.ValidArgsFunction = completeNames(&r)
	f.Register(cmd)
	t.register(cmd)
	command.Int(cmd, &length, "length", 16, 4096, "number of characters, 16 to 4096 (default 32)")
	cmd.Flags().StringVar(&charset, "charset", "", "characters: Alphanumeric, Hex, Base64URL or ASCII (default Alphanumeric)")
	cmd.Flags().StringVar(&algorithm, "key-pair", "", "a key pair instead: Ed25519, ECDSA-P256, ECDSA-P384, RSA-3072, RSA-4096, ML-DSA-65 or ML-KEM-768")
	command.Choices(cmd, "charset", "Alphanumeric", "Hex", "Base64URL", "ASCII")
	command.Choices(cmd, "key-pair", "Ed25519", "ECDSA-P256", "ECDSA-P384", "RSA-3072", "RSA-4096", "ML-DSA-65", "ML-KEM-768")
	cmd.MarkFlagsMutuallyExclusive("key-pair", "length")
	cmd.MarkFlagsMutuallyExclusive("key-pair", "charset")
	return cmd
}

// inFlags says of a mistake in a specification which flag has it.
func inFlags(err error) error {
	if fault.Of(err) != fault.Invalid {
		return err
	}
	field, text, _ := strings.Cut(err.Error(), ": ")
	flag := "KEY"
	switch {
	case strings.HasSuffix(field, ".charset"):
		flag = "--charset"
	case strings.HasSuffix(field, ".algorithm"):
		flag = "--key-pair"
	}
	return &command.StatusError{Status: command.StatusUsage, Err: errors.New(flag + ": " + text)}
}
