package command

import (
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/latticekeep/latticekeep/api/client"
)

// Server holds the address and the API key with which administrative commands call a running
// server.
type Server struct {
	URL, Key, KeyFile string
	JSON              bool
}

func (r *Server) Register(cmd *cobra.Command) {
	r.RegisterConnection(cmd)
	cmd.PersistentFlags().BoolVar(&r.JSON, "json", false, "print the answer as the server sent it")
}

// RegisterConnection defines the flags for the server's URL and the API key.
func (r *Server) RegisterConnection(cmd *cobra.Command) {
	flags := cmd.PersistentFlags()
	RegisterURL(flags, &r.URL, "base URL of the server")
	flags.StringVar(&r.Key, "api-key", "", "API key; other users of this machine may see it (environment: LATTICEKEEP_API_KEY)")
	flags.StringVar(&r.KeyFile, "api-key-file", "", "file that holds the API key")
	cmd.MarkFlagsMutuallyExclusive("api-key", "api-key-file")
}

// Client returns a client with the API key, which is needed.
func (r *Server) Client() (*client.V2, error) { return r.open(true) }

// OpenClient returns a client with the API key, if one is given.
func (r *Server) OpenClient() (*client.V2, error) { return r.open(false) }

func (r *Server) open(needsKey bool) (*client.V2, error) {
	key := r.Key
	switch {
	case r.KeyFile != "":
		b, err := os.ReadFile(r.KeyFile)
		if err != nil {
			return nil, fmt.Errorf("reading the API key: %w", err)
		}
		key = strings.TrimSpace(string(b))
	case key == "":
		key = os.Getenv("LATTICEKEEP_API_KEY")
	}
	switch {
	case r.URL == "":
		return nil, UsageError("no server: set --url or " + URLVariable)
	case key == "" && needsKey:
		return nil, UsageError("no API key: set --api-key-file or LATTICEKEEP_API_KEY")
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

// URLVariable is the environment variable with the URL of the server.
const URLVariable = "LATTICEKEEP_URL"

// RegisterURL defines the flag --url, which every command that calls a server has. Its default is in
// the environment.
func RegisterURL(flags *pflag.FlagSet, url *string, usage string) {
	flags.StringVar(url, "url", os.Getenv(URLVariable), usage+" (environment: "+URLVariable+")")
}
