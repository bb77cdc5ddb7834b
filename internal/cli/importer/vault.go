package importer

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/hashicorp/vault/api"
	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/internal/cli/command"
)

func newVaultCommand() *cobra.Command {
	var o options
	var address, tokenFile string
	cmd := &cobra.Command{
		Use:   "vault MOUNT[/PATH]",
		Short: "Import secrets of Vault or OpenBao from a KV engine",
		Long: `Read the secrets of a KV engine, version 1 or 2, of HashiCorp Vault or OpenBao by its
API, with all that is below PATH, and store each under its path in the mount. Of version
2 the newest version is read; what is deleted there is skipped. A value that is an
object or an array becomes its JSON text. The token needs read and list below the path.

Address and token are those of the programs vault and bao: VAULT_ADDR, VAULT_TOKEN,
VAULT_NAMESPACE and VAULT_CACERT, or the flags. This program reads and seals; the server
of the vault calls nobody.` + common,
		Example: `  export VAULT_ADDR=https://vault.example.org:8200
  latticekeep import vault --dry-run --vault-token-file token secret/shop --prefix from-vault`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := openVault(address, tokenFile)
			if err != nil {
				return err
			}
			return o.run(cmd, func(ctx context.Context) ([]secret, error) { return openEngine(ctx, c, args[0]) })
		},
	}
	o.register(cmd)
	cmd.Flags().StringVar(&address, "vault-addr", "", "URL of Vault or OpenBao (environment: "+api.EnvVaultAddress+")")
	cmd.Flags().StringVar(&tokenFile, "vault-token-file", "", "file with the token (environment: "+api.EnvVaultToken+", the token itself)")
	return cmd
}

func openVault(address, tokenFile string) (*api.Client, error) {
	if address = cmp.Or(address, os.Getenv(api.EnvVaultAddress)); address == "" {
		return nil, command.UsageError("no address of Vault: set --vault-addr or " + api.EnvVaultAddress)
	}
	token := os.Getenv(api.EnvVaultToken)
	if tokenFile != "" {
		b, err := os.ReadFile(tokenFile)
		if err != nil {
			return nil, fmt.Errorf("reading the token of Vault: %w", err)
		}
		token = strings.TrimSpace(string(b))
	}
	if token == "" {
		return nil, command.UsageError("no token of Vault: set --vault-token-file or " + api.EnvVaultToken)
	}
	config := api.DefaultConfig()
	if config.Error != nil {
		return nil, &command.StatusError{Status: command.StatusUsage, Err: fmt.Errorf("the environment variables of Vault's client cannot be used: %w", config.Error)}
	}
	if t, ok := config.HttpClient.Transport.(*http.Transport); ok && t.TLSClientConfig != nil && t.TLSClientConfig.InsecureSkipVerify {
		return nil, command.UsageError(api.EnvVaultSkipVerify + " gives the token to whoever answers: unset it, and name the authority in " + api.EnvVaultCACert)
	}
	// The token goes to the named server alone: not to an agent of the environment, and after no
	// redirect.
	config.Address, config.AgentAddress, config.DisableRedirects = address, "", true
	if u, err := url.Parse(address); err == nil && u.Scheme == "http" && !isLoopback(u.Hostname()) {
		return nil, command.UsageError("--vault-addr: plain HTTP to another machine shows it the token and every secret: use https")
	}
	c, err := api.NewClient(config)
	if err != nil {
		return nil, &command.StatusError{Status: command.StatusUsage, Err: fmt.Errorf("the address of Vault cannot be used: %w", err)}
	}
	c.SetToken(token)
	return c, nil
}

func isLoopback(host string) bool {
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// engine is a KV engine of Vault or OpenBao.
type engine struct {
	client    *api.Client
	mount     string // without slashes around it
	versioned bool   // version 2
}

// openEngine lists the secrets at and below a path. It finds mount and version as Vault's own program
// does.
func openEngine(ctx context.Context, c *api.Client, at string) ([]secret, error) {
	at = strings.Trim(at, "/")
	if err := checkName(at); err != nil {
		return nil, command.UsageError(err.Error())
	}
	found, err := c.Logical().ReadWithContext(ctx, "sys/internal/ui/mounts/"+at)
	if err != nil {
		if err = ofVault(err); errors.As(err, new(refused)) {
			err = &command.StatusError{Status: command.StatusRefused, Err: fmt.Errorf("%w; an engine must be there, and the token must be able to read below it", err)}
		}
		return nil, fmt.Errorf("looking for the KV engine of %s: %w", at, err)
	}
	if found == nil {
		return nil, &command.StatusError{Status: command.StatusRefused, Err: fmt.Errorf("there is no engine at %s in Vault", at)}
	}
	mount, _ := found.Data["path"].(string)
	kind, _ := found.Data["type"].(string)
	if kind != "kv" && kind != "generic" || mount == "" {
		return nil, command.UsageError(fmt.Sprintf("the engine at %s is of type %q: only KV engines have secrets to import", at, kind))
	}
	e := &engine{client: c, mount: strings.Trim(mount, "/")}
	if settings, ok := found.Data["options"].(map[string]any); ok {
		e.versioned = settings["version"] == "2"
	}
	below := strings.Trim(strings.TrimPrefix(at, e.mount), "/")

	all, err := e.list(ctx, below)
	if err != nil || below == "" {
		return all, err
	}
	// A secret may have the name of a folder. A token that may read only what is in the folder is
	// refused it, which says nothing.
	s := e.secret(below)
	_, err = s.read(ctx)
	var rule refused
	switch {
	case errors.Is(err, errNotThere), errors.As(err, &rule) && rule.status > 0 && len(all) > 0:
	case err == nil, errors.As(err, &rule), errors.As(err, new(skipped)):
		all = append([]secret{s}, all...)
	default:
		return nil, err
	}
	if len(all) == 0 {
		return nil, &command.StatusError{Status: command.StatusRefused, Err: fmt.Errorf("there are no secrets at %s in Vault", at)}
	}
	return all, nil
}

// list returns the secrets below a folder. A folder that may not be listed is a secret that cannot be
// read, and so is a name that is no part of a path.
func (e *engine) list(ctx context.Context, folder string) (all []secret, err error) {
	found, err := e.client.Logical().ListWithContext(ctx, e.path("metadata", folder))
	if err != nil {
		if err = ofVault(err); !errors.As(err, new(refused)) {
			return nil, fmt.Errorf("listing %s: %w", path.Join(e.mount, folder), err)
		}
		return []secret{{path.Join(e.mount, folder) + "/", folder, given(nil, refuse("listing: %v", err))}}, nil
	}
	if found == nil {
		return nil, nil
	}
	keys, _ := found.Data["keys"].([]any)
	for _, key := range keys {
		name, isText := key.(string)
		inner, isFolder := strings.CutSuffix(name, "/")
		whole := strings.TrimPrefix(folder+"/"+inner, "/")
		err := checkName(whole)
		switch {
		case !isText || err != nil:
			all = append(all, secret{e.mount + "/" + whole, whole, given(nil, cmp.Or(err, refuse("its name is no text")))})
		case isFolder:
			more, err := e.list(ctx, whole)
			if err != nil {
				return nil, err
			}
			all = append(all, more...)
		default:
			all = append(all, e.secret(whole))
		}
	}
	return all, nil
}

// path returns where something is. Engines of version 2 have data and metadata apart.
func (e *engine) path(kind, name string) string {
	if !e.versioned {
		kind = ""
	}
	return path.Join(e.mount, kind, name)
}

// errNotThere says that Vault has nothing at a path.
var errNotThere = refuse("it is not there any more")

func (e *engine) secret(name string) secret {
	return secret{e.mount + "/" + name, name, func(ctx context.Context) (map[string]string, error) {
		found, err := e.client.Logical().ReadWithContext(ctx, e.path("data", name))
		if err != nil {
			return nil, ofVault(err)
		}
		if found == nil {
			return nil, errNotThere
		}
		data := found.Data
		if e.versioned {
			var there bool
			if data, there = data["data"].(map[string]any); !there {
				return nil, skipped{"its newest version is deleted in Vault"}
			}
		}
		values := make(map[string]string)
		for _, key := range slices.Sorted(maps.Keys(data)) {
			switch v := data[key].(type) {
			case string:
				values[key] = v
			case nil:
				return nil, refuse("its value %.100q is null", key)
			default: // a json.Number, a bool, or something made of several values
				var b strings.Builder
				e := json.NewEncoder(&b)
				e.SetEscapeHTML(false)
				if err := e.Encode(v); err != nil {
					return nil, refuse("its value %.100q is no JSON", key)
				}
				values[key] = strings.TrimSuffix(b.String(), "\n")
			}
		}
		return values, nil
	}}
}

// ofVault returns an error of Vault in one line. Statuses that concern one path are refusals.
func ofVault(err error) error {
	var answer *api.ResponseError
	if !errors.As(err, &answer) {
		return fmt.Errorf("calling Vault: %w", err)
	}
	said := command.Printable(strings.Join(strings.Fields(strings.Join(answer.Errors, "; ")), " "))
	switch answer.StatusCode {
	case http.StatusForbidden, http.StatusBadRequest, http.StatusNotFound:
		return refused{fmt.Sprintf("Vault answered %d: %s", answer.StatusCode, said), answer.StatusCode}
	}
	return &command.StatusError{Status: command.StatusOfHTTP(answer.StatusCode), Err: fmt.Errorf("answer %d of Vault: %s", answer.StatusCode, said)}
}
