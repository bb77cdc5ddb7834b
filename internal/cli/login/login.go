// Package login provides the commands that make this machine a caller of a server, and end that.
package login

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/cli/profile"
	"github.com/latticekeep/latticekeep/internal/secret"
)

// maxKey is in bytes. An API key has fewer than a hundred.
const maxKey = 4 << 10

// NewCommand returns the command that stores a server and an API key as a profile.
func NewCommand() *cobra.Command {
	var url, name string
	cmd := &cobra.Command{
		Use:   "login --url URL [--profile NAME]",
		Short: "Store a server and an API key for all other commands",
		Long: `Ask a server who an API key is, and store both as a profile: from then on every
command that calls a server does so without --url and without a key. The API key
is typed in a terminal, which does not show it, or comes on standard input. Make
one in the dashboard, or with latticekeep apikey create.

Profiles are files of mode 0600 in the folder latticekeep/profiles of your
settings, such as ~/.config. A command takes the profile of --profile, else
that of ` + profile.Variable + `, else ` + profile.Default + `. Other settings go before:

  1  --url, --api-key-file and --api-key; or --profile
  2  the environment variables LATTICEKEEP_URL and LATTICEKEEP_API_KEY
  3  the profile of ` + profile.Variable + `, or ` + profile.Default + `

The key of a profile is sent to the server of that profile only. Without --url
a login to a profile that is there replaces its key.`,
		Example: `  latticekeep login --url https://vault.example.org
  latticekeep login --url https://staging.example.org --profile staging <api-key`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			name := chosen(name)
			if url == "" {
				switch former, err := profile.Load(name); {
				case err == nil:
					url = former.URL
				case errors.Is(err, fs.ErrNotExist):
					return command.UsageError("no server: set --url or " + command.URLVariable)
				default:
					return asUsage(err)
				}
			}
			key, err := readKey(cmd, url)
			if err != nil {
				return err
			}
			return login(cmd, name, profile.Profile{URL: strings.TrimRight(url, "/"), APIKey: key})
		},
	}
	command.RegisterURL(cmd.Flags(), &url, "base URL of the server")
	registerProfile(cmd, &name, "profile to store, in place of one of this name")
	return cmd
}

// NewLogoutCommand returns the command that forgets a profile.
func NewLogoutCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "logout [--profile NAME]",
		Short: "Forget a server and its API key",
		Long: `Delete a profile of latticekeep login. The API key stays valid: latticekeep apikey
revoke ends it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			name := chosen(name)
			switch err := profile.Remove(name); {
			case errors.Is(err, fs.ErrNotExist):
				return command.UsageError("there is no profile " + command.Printable(name))
			case err != nil:
				return asUsage(err)
			}
			_, err := fmt.Fprintf(cmd.ErrOrStderr(), "logged out of profile %s; its API key stays valid until somebody revokes it\n", name)
			return err
		},
	}
	registerProfile(cmd, &name, "profile to delete")
	return cmd
}

func registerProfile(cmd *cobra.Command, name *string, usage string) {
	cmd.Flags().StringVar(name, "profile", "", usage+" (environment: "+profile.Variable+"; default "+profile.Default+")")
}

func chosen(name string) string { return cmp.Or(name, os.Getenv(profile.Variable), profile.Default) }

func asUsage(err error) error {
	if errors.Is(err, profile.ErrName) {
		return &command.StatusError{Status: command.StatusUsage, Err: err}
	}
	return err
}

// readKey returns the API key that is typed or given on standard input.
func readKey(cmd *cobra.Command, url string) (string, error) {
	var text secret.Bytes
	typed, ok, err := command.Prompt(cmd, "API key for "+command.Printable(url))
	if text = typed; !ok {
		text, err = io.ReadAll(io.LimitReader(cmd.InOrStdin(), maxKey+1))
	}
	defer text.Zero()
	if err != nil {
		return "", fmt.Errorf("reading the API key: %w", err)
	}
	key := string(bytes.TrimSpace(text))
	if key == "" || len(text) > maxKey || strings.ContainsAny(key, " \t\r\n") {
		return "", command.UsageError("standard input is not an API key: give it the one line that begins with lk_")
	}
	return key, nil
}

// login asks the server whose key it is, and stores the profile.
func login(cmd *cobra.Command, name string, p profile.Profile) error {
	who, err := ask(cmd.Context(), p)
	if err != nil {
		return err
	}
	path, err := profile.Save(name, p)
	if err != nil {
		return asUsage(err)
	}
	var scopes []string
	for _, s := range who.Principal.Scopes {
		scopes = append(scopes, string(s))
	}
	_, err = fmt.Fprintf(cmd.ErrOrStderr(), "logged in to %s as %s of %s, which may: %s\nstored as profile %s in %s\n",
		command.Printable(p.URL), who.Principal.Id, command.Printable(who.Tenant.Name), strings.Join(scopes, ", "), name, command.Printable(path))
	return err
}

func ask(ctx context.Context, p profile.Profile) (*v2.AccountAnswer, error) {
	c, err := client.New(p.URL, client.WithAPIKey(p.APIKey))
	if err != nil {
		return nil, &command.StatusError{Status: command.StatusUsage, Err: err}
	}
	who, err := c.V2.GetAccount(ctx)
	if err != nil {
		return nil, fmt.Errorf("asking whose API key it is: %w", err)
	}
	return who, nil
}
