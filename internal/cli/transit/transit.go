// Package transit provides the commands that encrypt, decrypt, sign and verify data with the keys of a
// running server, and those for the named keys.
//
// Data goes from standard input to standard output. The file form of a ciphertext and of signatures
// is the JSON of the REST interface, so that other clients read it, too.
package transit

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

// maxData is the length in bytes of the longest text that the server takes, and maxAnswer that of the
// JSON with its ciphertext.
const (
	maxData   = 700 << 10
	maxAnswer = 2 << 20
)

// NewCommands returns all commands of the package.
func NewCommands() []*cobra.Command {
	return []*cobra.Command{newEncryptCommand(), newDecryptCommand(), newSignCommand(), newVerifyCommand(), newKeysCommand()}
}

// noData refuses arguments without quoting them: somebody may have given the data.
func noData(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return command.UsageError("unexpected argument: others can read those, so " + cmd.CommandPath() + " takes its data on standard input")
	}
	return nil
}

// readText returns standard input as the interface takes it.
func readText(cmd *cobra.Command) (string, error) {
	if command.IsTerminal(cmd.InOrStdin()) {
		return "", command.UsageError("standard input is a terminal: give the data by < or |")
	}
	text, err := command.ReadAll(cmd.InOrStdin(), "standard input", maxData)
	defer text.Zero()
	switch {
	case err != nil:
		return "", err
	case len(text) == 0:
		return "", command.UsageError("standard input is empty")
	case !utf8.Valid(text):
		return "", command.UsageError("standard input is not text in UTF-8: encode it, for example with base64")
	}
	return string(text), nil
}

func newEncryptCommand() *cobra.Command {
	var r command.Server
	var key string
	cmd := &cobra.Command{
		Example: `  latticekeep encrypt <orders.csv >orders.sealed`,
		Use:     "encrypt",
		Short:   "Encrypt standard input",
		Long: `Encrypt text from standard input, and print the ciphertext as JSON. The server keeps
neither; latticekeep decrypt opens it. The API key needs the scope crypto:encrypt,
and keys:read for --key with a name.`,
		Args: noData,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := r.Client()
			if err != nil {
				return err
			}
			request := v2.EncryptRequest{}
			if key != "" {
				id, err := findKey(cmd.Context(), c, key)
				if err != nil {
					return err
				}
				request.KeyId = &id
			}
			if request.Data, err = readText(cmd); err != nil {
				return err
			}
			answer, err := c.EncryptData(cmd.Context(), request)
			if err != nil {
				return fmt.Errorf("encrypting: %w", err)
			}
			return command.PrintJSON(cmd.OutOrStdout(), answer)
		},
	}
	r.RegisterConnection(cmd)
	cmd.Flags().StringVar(&key, "key", "", "name or id of the key (default the tenant's default key)")
	command.Choices[string](cmd, "key") // elsewhere it is a file
	return cmd
}

func newDecryptCommand() *cobra.Command {
	var r command.Server
	cmd := &cobra.Command{
		Example: `  latticekeep decrypt <orders.sealed >orders.csv`,
		Use:     "decrypt",
		Short:   "Decrypt what latticekeep encrypt printed",
		Long: `Decrypt the JSON of latticekeep encrypt, or of the REST interface, from standard input,
and print the text as it was. The API key needs the scope crypto:decrypt.`,
		Args: noData,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := r.Client()
			if err != nil {
				return err
			}
			text, err := command.ReadAll(cmd.InOrStdin(), "standard input", maxAnswer)
			if err != nil {
				return err
			}
			var request v2.DecryptRequest
			if json.Unmarshal(text, &request) != nil || request.CiphertextData == "" {
				return command.UsageError("standard input is not the JSON that latticekeep encrypt prints")
			}
			answer, err := c.DecryptData(cmd.Context(), request)
			if err != nil {
				return fmt.Errorf("decrypting: %w", err)
			}
			_, err = io.WriteString(cmd.OutOrStdout(), answer.Data)
			return err
		},
	}
	r.RegisterConnection(cmd)
	return cmd
}

func newSignCommand() *cobra.Command {
	var r command.Server
	var asJWS bool
	cmd := &cobra.Command{
		Example: `  latticekeep sign <orders.csv >orders.sig
  latticekeep sign --jws <release.json >release.jws`,
		Use:   "sign",
		Short: "Sign standard input",
		Long: `Sign text from standard input with ML-DSA-65 and HMAC-SHA-512, and print both
signatures as JSON. The API key needs the scope crypto:sign.

With --jws the output is one JSON Web Signature (RFC 7515) with ML-DSA-65 (RFC 9964), which has the text
in it. Any tool that knows RFC 9964 verifies it with a key of GET /api/v2/encryption/public-key, without this
server. The API key then also needs the scope that reads those keys, crypto:verify.`,
		Args: noData,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := r.Client()
			if err != nil {
				return err
			}
			data, err := readText(cmd)
			if err != nil {
				return err
			}
			if asJWS {
				compact, err := signJWS(cmd.Context(), c, data)
				if err != nil {
					return fmt.Errorf("signing: %w", err)
				}
				_, err = fmt.Fprintln(cmd.OutOrStdout(), compact)
				return err
			}
			answer, err := c.SignData(cmd.Context(), v2.SignRequest{Data: data})
			if err != nil {
				return fmt.Errorf("signing: %w", err)
			}
			return command.PrintJSON(cmd.OutOrStdout(), answer)
		},
	}
	r.RegisterConnection(cmd)
	cmd.Flags().BoolVar(&asJWS, "jws", false, "print a JSON Web Signature, which other tools verify")
	return cmd
}

// signJWS returns a JSON Web Signature in the compact serialization (RFC 7515 §7.1) with the algorithm
// ML-DSA-65 (RFC 9964 §4), which has the empty context, as the signatures of the server have. The private key
// stays in the server.
func signJWS(ctx context.Context, c *client.V2, payload string) (string, error) {
	keys, err := c.ListPublicKeys(ctx)
	if err != nil {
		return "", fmt.Errorf("reading the public keys: %w", err)
	}
	if len(keys.Keys) == 0 {
		return "", errors.New("the tenant has no signing key")
	}
	for id := keys.Keys[0].Kid; ; { // the newest; a rotation may come before the signature
		header, err := json.Marshal(map[string]string{"alg": "ML-DSA-65", "kid": id})
		if err != nil {
			return "", err
		}
		input := base64.RawURLEncoding.EncodeToString(header) + "." + base64.RawURLEncoding.EncodeToString([]byte(payload))
		answer, err := c.SignData(ctx, v2.SignRequest{Data: input})
		if err != nil {
			return "", err
		}
		if answer.KeyId != id {
			id = answer.KeyId
			continue
		}
		signature, err := base64.StdEncoding.DecodeString(answer.PqcSignature)
		if err != nil {
			return "", errors.New("the server's signature is not base64")
		}
		return input + "." + base64.RawURLEncoding.EncodeToString(signature), nil
	}
}

func newVerifyCommand() *cobra.Command {
	var r command.Server
	var file string
	cmd := &cobra.Command{
		Example: `  latticekeep verify --signatures orders.sig <orders.csv`,
		Use:     "verify --signatures FILE",
		Short:   "Verify signatures of standard input",
		Long: `Verify that both signatures of latticekeep sign belong to the text on standard input.
The exit status is 0 if both are valid, and 1 if one is not. The API key needs the
scope crypto:verify.`,
		Args: noData,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := r.Client()
			if err != nil {
				return err
			}
			text, err := command.ReadFile(file, maxAnswer)
			if err != nil {
				return err
			}
			var request v2.VerifyRequest
			if json.Unmarshal(text, &request) != nil || request.PqcSignature == "" {
				return command.UsageError("--signatures is not a file with the JSON that latticekeep sign prints")
			}
			if request.Data, err = readText(cmd); err != nil {
				return err
			}
			answer, err := c.VerifyData(cmd.Context(), request)
			if err != nil {
				return fmt.Errorf("verifying: %w", err)
			}
			if !answer.Valid {
				return errors.New("not valid: the signatures do not belong to this data")
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), "valid")
			return err
		},
	}
	r.RegisterConnection(cmd)
	cmd.Flags().StringVar(&file, "signatures", "", "file with what latticekeep sign printed")
	_ = cmd.MarkFlagRequired("signatures") // cannot fail: the flag exists
	return cmd
}

// isKeyID tells ids from names.
var isKeyID = regexp.MustCompile(`^tkey_[a-z2-7]{26}$`)

// keys returns the named keys of the tenant, oldest first.
func keys(ctx context.Context, c *client.V2) ([]v2.EncryptionKey, error) {
	all, p := []v2.EncryptionKey{}, v2.ListKeysParams{Limit: new(100)}
	for {
		page, err := c.ListKeys(ctx, &p)
		if err != nil {
			return nil, fmt.Errorf("listing keys: %w", err)
		}
		all = append(all, page.Keys...)
		if page.NextCursor == nil {
			return all, nil
		}
		p.Cursor = page.NextCursor
	}
}

// findKey returns the id of a key by its name or id.
func findKey(ctx context.Context, c *client.V2, name string) (string, error) {
	if isKeyID.MatchString(name) {
		return name, nil
	}
	all, err := keys(ctx, c)
	if err != nil {
		return "", err
	}
	var ids []string
	for _, key := range all {
		if key.Name == name {
			ids = append(ids, key.KeyId)
		}
	}
	switch len(ids) {
	case 0:
		return "", &command.StatusError{Status: command.StatusRefused, Err: fmt.Errorf("there is no key %s: latticekeep keys list shows them", command.Printable(name))}
	case 1:
		return ids[0], nil
	}
	return "", command.UsageError(fmt.Sprintf("%d keys have the name %s: give the id of one of them, %s", len(ids), command.Printable(name), strings.Join(ids, ", ")))
}

func printKeys(out io.Writer, all ...v2.EncryptionKey) {
	var rows [][]string
	for _, k := range all {
		use := ""
		if k.Default {
			use = "default"
		}
		rows = append(rows, []string{command.Printable(k.Name), strconv.FormatInt(k.Version, 10), command.Day(&k.RotatedAt), command.Day(&k.NextRotationAt), k.KeyId, use})
	}
	command.Table(out, "NAME VERSION ROTATED NEXT ID DEFAULT", rows)
}

func newKeysCommand() *cobra.Command {
	var r command.Server
	cmd := &cobra.Command{Use: "keys", Short: "List, create and rotate named keys", Long: `List, create and rotate the named keys of latticekeep encrypt. They never leave the
server. The API key needs the scope keys:read, and keys:write to change something.`}
	r.RegisterConnection(cmd)
	cmd.AddCommand(newKeysListCommand(&r), newKeysCreateCommand(&r), newKeysRotateCommand(&r))
	return cmd
}

func newKeysListCommand(r *command.Server) *cobra.Command {
	var f command.Format
	cmd := &cobra.Command{
		Use: "list", Short: "List the named keys", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := f.Check(); err != nil {
				return err
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			all, err := keys(cmd.Context(), c)
			if err != nil {
				return err
			}
			return f.Print(cmd.OutOrStdout(), all, func(out io.Writer) { printKeys(out, all...) })
		},
	}
	f.Register(cmd)
	return cmd
}

func newKeysCreateCommand(r *command.Server) *cobra.Command {
	var f command.Format
	var days *int
	cmd := &cobra.Command{
		Use: "create NAME", Short: "Create a named key", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.Check(); err != nil {
				return err
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			answer, err := c.CreateKey(cmd.Context(), v2.CreateKeyRequest{Name: args[0], RotationPeriod: days})
			if err != nil {
				return fmt.Errorf("creating the key: %w", err)
			}
			return f.Print(cmd.OutOrStdout(), answer.Key, func(out io.Writer) { printKeys(out, answer.Key) })
		},
	}
	f.Register(cmd)
	command.Int(cmd, &days, "rotation-days", 1, 3650, "after how many days the key rotates by itself, 1 to 3650 (default 90)")
	return cmd
}

func newKeysRotateCommand(r *command.Server) *cobra.Command {
	var f command.Format
	var again bool
	cmd := &cobra.Command{
		Use: "rotate NAME", Short: "Add a version to a named key, which encrypts from now on", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.Check(); err != nil {
				return err
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			id, err := findKey(cmd.Context(), c, args[0])
			if err != nil {
				return err
			}
			request := v2.RotateKeyRequest{}
			if again {
				request.ReEncryptData = &again
			}
			answer, err := c.RotateKey(cmd.Context(), id, request)
			if err != nil {
				return fmt.Errorf("rotating the key: %w", err)
			}
			return f.Print(cmd.OutOrStdout(), answer.Key, func(out io.Writer) { printKeys(out, answer.Key) })
		},
	}
	f.Register(cmd)
	cmd.Flags().BoolVar(&again, "reencrypt", false, "encrypt the key material of all versions again")
	return cmd
}
