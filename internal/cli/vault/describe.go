package vault

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

func newDescribeCommand() *cobra.Command {
	var r command.Server
	var f command.Format
	var description, contact string
	var add, remove, without []string
	cmd := &cobra.Command{
		Use:   "describe NAME",
		Short: "Say what a credential is for, or print what was said",
		Long: `Change what flags name of a credential's description, contact and tags, and print what
it then has. Its values and its version stay. All of that is no more secret than its
name. latticekeep ls --tag lists what has a tag. The API key needs the scope vault:read,
and for a change vault:write.`,
		Example: `  latticekeep describe shop/prod/db --description 'Orders of the shop.' --contact orders@example.com --tag pci
  latticekeep describe shop/prod/db`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := f.Check(); err != nil {
				return err
			}
			var to v2.DetailsRequest
			if cmd.Flags().Changed("description") {
				to.Description = &description
			}
			if cmd.Flags().Changed("contact") {
				to.Contact = &contact
			}
			for _, field := range without {
				switch field {
				case "description":
					to.Description = new(string)
				case "contact":
					to.Contact = new(string)
				case "tags":
					to.Tags = &[]string{}
				default:
					return command.UsageError("--clear must be description, contact or tags")
				}
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			found, err := mustFindAny(cmd.Context(), c, args[0])
			if err != nil {
				return err
			}
			said, err := describe(cmd.Context(), c, found, to, add, remove)
			if err != nil {
				return fmt.Errorf("describing %s: %w", command.Printable(args[0]), err)
			}
			return f.Print(cmd.OutOrStdout(), said, func(out io.Writer) { printDetails(out, said) })
		},
	}
	r.RegisterConnection(cmd)
	cmd.ValidArgsFunction = completeNames(&r)
	f.Register(cmd)
	cmd.Flags().StringVar(&description, "description", "", "what it is for")
	cmd.Flags().StringVar(&contact, "contact", "", "whom to ask about it")
	cmd.Flags().StringArrayVar(&add, "tag", nil, "tag to add; may be repeated")
	cmd.Flags().StringArrayVar(&remove, "untag", nil, "tag to take away; may be repeated")
	cmd.Flags().StringArrayVar(&without, "clear", nil, "what to take away: description, contact or tags; may be repeated")
	command.Choices(cmd, "clear", "description", "contact", "tags")
	return cmd
}

// describe changes the details of a credential, if there is something to change, and returns it with them.
func describe(ctx context.Context, c *client.V2, found *v2.Credential, to v2.DetailsRequest, add, remove []string) (v2.Credential, error) {
	if len(add)+len(remove) > 0 {
		tags := slices.Concat(tagsOf(found), add)
		if to.Tags != nil { // cleared
			tags = add
		}
		tags = slices.DeleteFunc(tags, func(tag string) bool { return slices.Contains(remove, tag) })
		to.Tags = &tags
	}
	if to == (v2.DetailsRequest{}) {
		return *found, nil
	}
	answer, err := c.DescribeCredential(ctx, found.CredentialId, to)
	if err != nil {
		return v2.Credential{}, err
	}
	return credentialOf(answer), nil
}

func tagsOf(c *v2.Credential) []string {
	if c.Tags == nil {
		return nil
	}
	return *c.Tags
}

func printDetails(out io.Writer, c v2.Credential) {
	rows := [][]string{{"name", command.Printable(c.Name)}, {"id", c.CredentialId}, {"type", c.CredentialType}}
	for _, field := range []struct {
		name string
		text *string
	}{{"description", c.Description}, {"contact", c.Contact}} {
		if field.text != nil {
			rows = append(rows, []string{field.name, command.Printable(*field.text)})
		}
	}
	if tags := tagsOf(&c); len(tags) > 0 {
		rows = append(rows, []string{"tags", command.Printable(strings.Join(tags, " "))})
	}
	command.Table(out, "FIELD VALUE", rows)
}
