package importer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/dotenv"
)

// NewCommand returns the group of all imports. others are imports of other packages.
func NewCommand(others ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: "import", Short: "Import secrets from files and other tools"}
	cmd.AddCommand(newEnvCommand(), newJSONCommand(), newVaultCommand(), newAWSCommand())
	cmd.AddCommand(others...)
	return cmd
}

func newEnvCommand() *cobra.Command {
	var o options
	var name string
	cmd := &cobra.Command{
		Use:   "env FILE --name NAME",
		Short: "Import a .env file as one credential",
		Long: `Store the variables of a .env file as the values of one credential. A line is
NAME=VALUE, with or without "export" before it. Values may stand in single or double
quotes, also over several lines; \n, \r, \t, \", \\ and \$ are escapes in double quotes.
Nothing is expanded: $NAME stays as it is. FILE is - for standard input.` + common,
		Example: `  latticekeep import env --dry-run .env --name shop/prod/env
  sops -d prod.env | latticekeep import env - --name shop/prod/env`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.run(cmd, func(context.Context) ([]secret, error) {
				text, err := readFile(cmd, args[0])
				if err != nil {
					return nil, err
				}
				variables, err := dotenv.Parse(text)
				if err != nil {
					return nil, fmt.Errorf("reading %s: %w", args[0], err)
				}
				values := make(map[string]string)
				for _, v := range variables {
					values[v.Name] = v.Value
				}
				return []secret{{args[0], name, given(values, nil)}}, nil
			})
		},
	}
	o.register(cmd)
	cmd.Flags().StringVar(&name, "name", "", "name of the credential")
	_ = cmd.MarkFlagRequired("name") // cannot fail: the flag exists
	return cmd
}

func newJSONCommand() *cobra.Command {
	var o options
	var name string
	cmd := &cobra.Command{
		Use:   "json FILE",
		Short: "Import a JSON file of secrets",
		Long: `Store the objects of a JSON file as credentials. An object whose members are strings,
numbers, true or false is a credential, and its members are the values. An object of
objects is a folder: {"shop": {"db": {"user": "a"}}} is the credential shop/db with the
value user. --name names the file itself, when it is one flat object. FILE is - for
standard input.` + common,
		Example: `  latticekeep import json --dry-run secrets.json --prefix shop/prod
  vault kv get -format=json -field=data secret/db | latticekeep import json - --name shop/db`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.run(cmd, func(context.Context) ([]secret, error) {
				text, err := readFile(cmd, args[0])
				if err != nil {
					return nil, err
				}
				root, err := parseJSON(text)
				if err == nil && root.members == nil {
					err = errors.New("it is no JSON object")
				}
				if err != nil {
					return nil, fmt.Errorf("reading %s: %w", args[0], err)
				}
				found := root.secrets(args[0], name)
				if len(found) == 1 && found[0].name == "" {
					return nil, command.UsageError(args[0] + " is one flat object: say with --name what its credential is called")
				}
				return found, nil
			})
		},
	}
	o.register(cmd)
	cmd.Flags().StringVar(&name, "name", "", "name of the credential, or of the folder of all")
	return cmd
}

func newAWSCommand() *cobra.Command {
	var o options
	cmd := &cobra.Command{
		Use:   "aws FILE...",
		Short: "Import what aws secretsmanager batch-get-secret-value has printed",
		Long: `Store the secrets that "aws secretsmanager batch-get-secret-value" prints as JSON, under
their names; a / before a name is left out. A secret whose text is a JSON object of
strings, numbers, true and false becomes its values. Any other text becomes the value
called "value", and a binary secret the value "value.base64" in base64. Secrets that AWS
did not give, which the file lists as errors, are refused. FILE is - for standard input.` + common,
		Example: `  aws secretsmanager batch-get-secret-value --filters Key=name,Values=shop/ > secrets.json
  latticekeep import aws --dry-run secrets.json`,
		Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, files []string) error {
			return o.run(cmd, func(context.Context) (all []secret, err error) {
				for _, file := range files {
					text, err := readFile(cmd, file)
					if err != nil {
						return nil, err
					}
					found, err := parseAWS(file, text)
					if err != nil {
						return nil, fmt.Errorf("reading %s: %w", file, err)
					}
					all = append(all, found...)
				}
				return all, nil
			})
		},
	}
	o.register(cmd)
	return cmd
}

// parseAWS reads an answer of BatchGetSecretValue (AWS Secrets Manager API reference, 2017-10-17).
func parseAWS(file string, text []byte) (all []secret, err error) {
	if _, err := parseJSON(text); err != nil {
		return nil, err // with a line, and without a part of the text
	}
	var answer struct {
		SecretValues []struct {
			ARN, Name    string
			SecretString *string
			SecretBinary *string
		}
		Errors []struct{ SecretID, ErrorCode string }
		// NextToken is there when the answer was one page of several.
		NextToken string
	}
	if err := json.Unmarshal(text, &answer); err != nil || answer.SecretValues == nil && answer.Errors == nil {
		return nil, errors.New("it is no answer of batch-get-secret-value: it has no list SecretValues")
	}
	for _, s := range answer.SecretValues {
		one := secret{source: s.Name, name: strings.TrimLeft(s.Name, "/")}
		switch {
		case s.SecretString != nil:
			one.read = given(valuesOf(*s.SecretString), nil)
		case s.SecretBinary != nil:
			one.read = given(map[string]string{"value.base64": *s.SecretBinary}, nil)
		default:
			one.read = given(nil, refuse("it has no SecretString and no SecretBinary"))
		}
		all = append(all, one)
	}
	for _, e := range answer.Errors {
		all = append(all, secret{e.SecretID, e.SecretID, given(nil, refuse("AWS did not give it: %s", command.Printable(e.ErrorCode)))})
	}
	if answer.NextToken != "" {
		all = append(all, secret{file, file, given(nil, skipped{"it is one page of several: import the file of batch-get-secret-value --next-token too"})})
	}
	return all, nil
}

// valuesOf returns the values of a text that is a flat JSON object, or else the text as one value.
func valuesOf(text string) map[string]string {
	if n, err := parseJSON([]byte(text)); err == nil && len(n.members) > 0 {
		if values, err := n.values(); err == nil {
			return values
		}
	}
	return map[string]string{"value": text}
}

// maxFile bounds a file or standard input, in bytes.
const maxFile = 256 << 20

func readFile(cmd *cobra.Command, path string) ([]byte, error) {
	if path == "-" {
		return command.ReadAll(cmd.InOrStdin(), "standard input", maxFile)
	}
	return command.ReadFile(path, maxFile)
}

// node is a value of a JSON text. An object has members, which may be empty but not nil.
type node struct {
	members []member
	text    string // a string, or a number, true or false as it was written
	isText  bool
	kind    string // null or array
}

type member struct {
	name string
	node *node
}

// parseJSON reads a JSON text. Its error names the line, and no part of the text but a name that an
// object has twice.
func parseJSON(text []byte) (*node, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	n, err := parseNode(d)
	if err == nil {
		if _, end := d.Token(); !errors.Is(end, io.EOF) {
			err = errors.New("something follows the JSON value")
		}
	}
	if err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
			err = errors.New("it is no JSON")
		}
		return nil, fmt.Errorf("line %d: %w", bytes.Count(text[:d.InputOffset()], []byte("\n"))+1, err)
	}
	return n, nil
}

func parseNode(d *json.Decoder) (*node, error) {
	token, err := d.Token()
	if err != nil {
		return nil, err
	}
	switch v := token.(type) {
	case string:
		return &node{text: v, isText: true}, nil
	case json.Number:
		return &node{text: v.String(), isText: true}, nil
	case bool:
		return &node{text: fmt.Sprint(v), isText: true}, nil
	case nil:
		return &node{kind: "null"}, nil
	case json.Delim:
		if v == '[' {
			for d.More() {
				if _, err := parseNode(d); err != nil {
					return nil, err
				}
			}
			_, err := d.Token()
			return &node{kind: "an array"}, err
		}
	}
	n := &node{members: []member{}}
	seen := make(map[string]bool)
	for d.More() {
		token, err := d.Token()
		if err != nil {
			return nil, err
		}
		name, _ := token.(string)
		if seen[name] {
			return nil, fmt.Errorf("an object has the name %.100q twice", name)
		}
		seen[name] = true
		inner, err := parseNode(d)
		if err != nil {
			return nil, err
		}
		n.members = append(n.members, member{name, inner})
	}
	_, err = d.Token()
	return n, err
}

// secrets returns an object as a credential, or what a folder of objects has.
func (n *node) secrets(file, path string) (all []secret) {
	if len(n.members) == 0 || n.members[0].node.members == nil {
		values, err := n.values()
		return []secret{{strings.TrimSuffix(file+": "+path, ": "), path, given(values, err)}}
	}
	for _, m := range n.members {
		name := strings.TrimPrefix(path+"/"+m.name, "/")
		if m.node.members == nil {
			all = append(all, secret{file + ": " + name, name, given(nil, refuse("it stands beside objects: a folder has objects only"))})
			continue
		}
		all = append(all, m.node.secrets(file, name)...)
	}
	return all
}

// values returns the members of a flat object.
func (n *node) values() (map[string]string, error) {
	values := make(map[string]string)
	for _, m := range n.members {
		switch {
		case m.node.members != nil:
			return nil, refuse("its member %.100q is an object beside values", m.name)
		case !m.node.isText:
			return nil, refuse("its member %.100q is %s: a value is a string, a number, true or false", m.name, m.node.kind)
		}
		values[m.name] = m.node.text
	}
	return values, nil
}
