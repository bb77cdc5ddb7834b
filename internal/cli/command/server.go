package command

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/internal/cli/profile"
)

// Server holds the address and the API key with which commands call a running server. Flags go before
// the environment, and that before the profile of latticekeep login.
type Server struct {
	URL, Key, KeyFile, Profile string
	JSON                       bool
}

func (r *Server) Register(cmd *cobra.Command) {
	r.RegisterConnection(cmd)
	cmd.PersistentFlags().BoolVar(&r.JSON, "json", false, "print the answer as the server sent it")
}

// RegisterConnection defines the flags for the server's URL and the API key.
func (r *Server) RegisterConnection(cmd *cobra.Command) {
	r.RegisterKey(cmd, cmd.PersistentFlags(), "base URL of the server")
}

// RegisterKey is RegisterConnection for flags of the caller's choice.
func (r *Server) RegisterKey(cmd *cobra.Command, flags *pflag.FlagSet, usage string) {
	r.RegisterAddress(cmd, flags, usage)
	flags.StringVar(&r.Key, "api-key", "", "API key; other users of this machine may see it (environment: "+KeyVariable+")")
	flags.StringVar(&r.KeyFile, "api-key-file", "", "file that holds the API key")
	cmd.MarkFlagsMutuallyExclusive("api-key", "api-key-file", "profile")
}

// RegisterAddress defines the flags for the server's URL only.
func (r *Server) RegisterAddress(cmd *cobra.Command, flags *pflag.FlagSet, usage string) {
	RegisterURL(flags, &r.URL, usage)
	flags.StringVar(&r.Profile, "profile", "", "profile of latticekeep login that names the server (environment: "+profile.Variable+"; default "+profile.Default+")")
	cmd.MarkFlagsMutuallyExclusive("url", "profile")
}

// Client returns a client with the API key, which is needed.
func (r *Server) Client() (*client.V2, error) { return r.open(true) }

// OpenClient returns a client with the API key, if one is given.
func (r *Server) OpenClient() (*client.V2, error) { return r.open(false) }

// Locate completes URL and key from the profile. A command calls it when it needs to know whether
// there is a server. The key of a profile goes to the URL of that profile only.
func (r *Server) Locate() error {
	name := r.Profile
	if name == "" {
		if r.Key == "" && r.KeyFile == "" {
			r.Key = os.Getenv(KeyVariable)
		}
		if r.URL != "" && (r.Key != "" || r.KeyFile != "") {
			return nil
		}
		name = os.Getenv(profile.Variable)
		if name != "" && r.URL == "" && os.Getenv(KeyVariable) != "" {
			return UsageError(KeyVariable + " is set beside " + profile.Variable + ", and would go to the server of that profile: unset one of them, or name the server with --url")
		}
	}
	p, err := profile.Load(cmp.Or(name, profile.Default))
	switch {
	case err == nil:
	case name == "" && (errors.Is(err, fs.ErrNotExist) || !hasFolder()):
		return nil // somebody who has never logged in
	case errors.Is(err, profile.ErrName), errors.Is(err, fs.ErrNotExist):
		if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("there is no profile %s: run latticekeep login --profile %s --url URL", Printable(name), Printable(name))
		}
		return &StatusError{StatusUsage, err}
	default:
		return fmt.Errorf("reading the profile: %w", err)
	}
	switch {
	case r.Profile != "": // goes before the environment
		r.URL, r.Key = p.URL, p.APIKey
	case r.URL == "":
		r.URL = p.URL
	}
	if r.Key == "" && r.KeyFile == "" && strings.TrimRight(r.URL, "/") == p.URL {
		r.Key = p.APIKey
	}
	return nil
}

// hasFolder reports whether there is a place for profiles, as there is for every person.
func hasFolder() bool {
	_, err := os.UserConfigDir()
	return err == nil
}

// Resolve completes URL and key from the profile and the file of the key, and returns the key, which is
// needed if needsKey is set. The URL always is.
func (r *Server) Resolve(needsKey bool) (key string, err error) {
	if err := r.Locate(); err != nil {
		return "", err
	}
	key = r.Key
	if r.KeyFile != "" {
		b, err := os.ReadFile(r.KeyFile)
		if err != nil {
			return "", fmt.Errorf("reading the API key: %w", err)
		}
		key = strings.TrimSpace(string(b))
	}
	switch {
	case r.URL == "":
		return "", UsageError("no server: set --url or " + URLVariable + ", or run latticekeep login")
	case key == "" && needsKey:
		return "", UsageError("no API key: set --api-key-file or " + KeyVariable + ", or run latticekeep login")
	}
	return key, nil
}

func (r *Server) open(needsKey bool) (*client.V2, error) {
	key, err := r.Resolve(needsKey)
	if err != nil {
		return nil, err
	}
	var options []client.Option
	if key != "" {
		options = append(options, client.WithAPIKey(key))
	}
	c, err := client.New(r.URL, options...)
	if err != nil {
		return nil, &StatusError{StatusUsage, err}
	}
	return c.V2, nil
}

// Environment variables with the URL of the server and the API key.
const (
	URLVariable = "LATTICEKEEP_URL"
	KeyVariable = "LATTICEKEEP_API_KEY"
)

// RegisterURL defines the flag --url, which every command that calls a server has. Its default is in
// the environment.
func RegisterURL(flags *pflag.FlagSet, url *string, usage string) {
	flags.StringVar(url, "url", os.Getenv(URLVariable), usage+" (environment: "+URLVariable+")")
}
