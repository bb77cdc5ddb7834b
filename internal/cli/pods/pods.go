// Package pods has the commands that bring credentials to pods and services as files.
package pods

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	"github.com/latticekeep/latticekeep/internal/agent"
	"github.com/latticekeep/latticekeep/internal/buildinfo"
	"github.com/latticekeep/latticekeep/internal/cli/command"
	"github.com/latticekeep/latticekeep/internal/csi"
	"github.com/latticekeep/latticekeep/internal/delivery"
	"github.com/latticekeep/latticekeep/internal/dumps"
	"github.com/latticekeep/latticekeep/internal/logs"
	"github.com/latticekeep/latticekeep/internal/volume"
)

const caUsage = "file with the authorities of the server's certificate, as PEM; without it those of the system"

// NewProviderCommand returns the command of the CSI provider.
func NewProviderCommand() *cobra.Command {
	var url, caFile, socket string
	cmd := &cobra.Command{
		Use: "csi-provider", Short: "Serve the Secrets Store CSI driver on this node", Args: cobra.NoArgs,
		Long: `Serve the Secrets Store CSI driver on this node, as the DaemonSet of the chart does with
csiProvider.enabled. It has no right of its own: it reads each credential over REST with the token of
the pod that the volume is for, which the driver hands to it, and stores nothing.`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := dumps.Forbid(); err != nil {
				return err
			}
			server, err := newServer(url, caFile)
			if err != nil {
				return err
			}
			limited, end := logs.Limit(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
			defer end()
			return csi.Serve(cmd.Context(), csi.Config{Server: server, Socket: socket, Version: buildinfo.Version(), Logger: slog.New(limited)})
		},
	}
	command.RegisterURL(cmd.Flags(), &url, "base URL of the server")
	cmd.Flags().StringVar(&caFile, "ca-file", "", caUsage)
	cmd.Flags().StringVar(&socket, "socket", "/var/run/secrets-store-csi-providers/latticekeep.sock", "path of the socket; its file name without .sock is spec.provider of a SecretProviderClass")
	return cmd
}

func newServer(url, caFile string, options ...client.Option) (*delivery.Server, error) {
	if url == "" {
		return nil, command.UsageError("no server: set --url or " + command.URLVariable)
	}
	s, err := delivery.NewServer(url, caFile, options...)
	if err != nil {
		return nil, &command.StatusError{Status: command.StatusUsage, Err: err}
	}
	return s, nil
}

// agentFlags are those of the agent.
type agentFlags struct {
	server                command.Server
	caFile, tokenFile     string
	files, into, onChange string
	once, allowDisk       bool
	timeout               time.Duration
}

// NewAgentCommand returns the command of the agent.
func NewAgentCommand() *cobra.Command {
	var f agentFlags
	cmd := &cobra.Command{
		Use:   "agent --files FILE --into FOLDER -- [COMMAND [ARGUMENT]...]",
		Short: "Keep files up to date with credentials",
		Long: `Write credentials to files in a folder, wait for new versions, and write the files again. All files are
replaced in one step. When a credential cannot be read any more, the files that are there stay.

FILE is a list in YAML. Each entry has the path of a file and the name of a credential. With key the file is one
value. With template it is a text in which $(key) stands for a value; encoding: URL or JSON encodes the values.
With format: env it is a .env file of all values. Without these, path is a folder with a file for each value.
mode is the mode of the files in octal, 0440 by default.

In a pod the agent reads with the token of its ServiceAccount (--token-file), which needs the verb unseal. Elsewhere it
reads with an API key that has the scope vault:read. The folder must be in memory, as is an emptyDir with medium:
Memory, unless --allow-disk is given.

With --once the agent ends when the files are there, as an init container or a step before a service does; it takes no
COMMAND then. With COMMAND, it starts the command once the files are written, forwards signals to it, and exits with its
status.`,
		Example: `  latticekeep agent --once --url https://vault.example.org --api-key-file orders.key --files files.yaml --into /run/orders
  latticekeep agent --url https://latticekeep.latticekeep-system.svc:8200 --ca-file /var/run/latticekeep/ca.crt --token-file /var/run/latticekeep/token --files files.yaml --into /credentials -- ./server`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error { return f.run(cmd, args) },
	}
	f.server.RegisterConnection(cmd)
	flags := cmd.Flags()
	flags.StringVar(&f.caFile, "ca-file", "", caUsage)
	flags.StringVar(&f.tokenFile, "token-file", "", "file with a ServiceAccount's token for the audience latticekeep, instead of an API key")
	flags.StringVar(&f.files, "files", "", "YAML list of the files to write")
	flags.StringVar(&f.into, "into", "", "folder for the files")
	flags.BoolVar(&f.once, "once", false, "end when the files are there")
	flags.BoolVar(&f.allowDisk, "allow-disk", false, "write into a folder that is not in memory: values may stay on the disk")
	flags.DurationVar(&f.timeout, "timeout", 2*time.Minute, "how long to retry the first write before giving up")
	flags.StringVar(&f.onChange, "on-change", "none", "what COMMAND gets after a change: none, restart, or a signal such as HUP")
	_ = cmd.MarkFlagRequired("files") // cannot fail: the flag exists
	_ = cmd.MarkFlagRequired("into")  // likewise
	for _, other := range []string{"api-key", "api-key-file", "profile"} {
		cmd.MarkFlagsMutuallyExclusive("token-file", other)
	}
	flags.SetInterspersed(false) // what follows the command is the command's
	return cmd
}

func (f *agentFlags) run(cmd *cobra.Command, args []string) error {
	if err := dumps.Forbid(); err != nil {
		return err
	}
	reaction, path, err := f.command(args)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(f.files)
	if err != nil {
		return fmt.Errorf("reading --files: %w", err)
	}
	plan, err := delivery.Parse(string(text), 0o440)
	if err != nil {
		return &command.StatusError{Status: command.StatusUsage, Err: fmt.Errorf("%s: %w", f.files, err)}
	}
	if err := f.checkFolder(); err != nil {
		return err
	}
	server, err := f.connect()
	if err != nil {
		return err
	}
	limited, end := logs.Limit(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
	defer end()
	a, err := agent.New(agent.Config{Server: server, TokenFile: f.tokenFile, Plan: plan, Dir: f.into, Logger: slog.New(limited)})
	if err != nil {
		return err
	}
	defer a.Close()
	first, cancel := context.WithTimeout(cmd.Context(), f.timeout)
	err = a.Write(first)
	cancel()
	if err != nil || f.once {
		return err
	}
	return f.follow(cmd.Context(), a, path, args, reaction)
}

// follow keeps the files up to date until ctx or the command ends.
func (f *agentFlags) follow(ctx context.Context, a *agent.Agent, path string, args []string, r agent.Reaction) error {
	if path == "" {
		a.Follow(ctx, func() {})
		return nil
	}
	following, stop := context.WithCancel(ctx)
	changed, ended := make(chan struct{}, 1), make(chan struct{})
	go func() {
		defer close(ended)
		a.Follow(following, func() {
			select {
			case changed <- struct{}{}:
			default: // one that is not seen yet stands for this one, too
			}
		})
	}()
	status, err := agent.Run(ctx, agent.Command{Path: path, Args: args, Env: command.Environment(nil)}, changed, r)
	stop()
	<-ended
	if err == nil && status != 0 {
		return &command.StatusError{Status: status, Err: fmt.Errorf("%s ended with status %d", command.Printable(args[0]), status)}
	}
	return err
}

// signals are those that programs take for a change of their files, by the names that shells give them.
var signals = map[string]syscall.Signal{
	"HUP": syscall.SIGHUP, "INT": syscall.SIGINT, "QUIT": syscall.SIGQUIT, "TERM": syscall.SIGTERM, "USR1": syscall.SIGUSR1, "USR2": syscall.SIGUSR2,
}

// command checks COMMAND and --on-change. path is empty without a command.
func (f *agentFlags) command(args []string) (r agent.Reaction, path string, err error) {
	switch name := strings.TrimPrefix(strings.ToUpper(f.onChange), "SIG"); name {
	case "NONE":
	case "RESTART":
		r.Restart = true
	default:
		if r.Signal = signals[name]; r.Signal == 0 {
			return r, "", command.UsageError("--on-change takes none, restart, HUP, INT, QUIT, TERM, USR1 or USR2")
		}
	}
	if len(args) == 0 {
		if r != (agent.Reaction{}) {
			return r, "", command.UsageError("--on-change needs a command: add -- COMMAND")
		}
		return r, "", nil
	}
	if f.once {
		return r, "", command.UsageError("--once ends when the files are there, and starts no command: leave one of them out")
	}
	if path, err = exec.LookPath(args[0]); err != nil {
		return r, "", command.UsageError("there is no program " + command.Printable(args[0]) + " that can be run")
	}
	return r, path, nil
}

func (f *agentFlags) checkFolder() error {
	is, err := volume.IsInMemory(f.into)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return command.UsageError("the folder of --into does not exist: mount a volume there, or make it")
	case err != nil:
		return fmt.Errorf("looking at the folder of --into: %w", err)
	case !is && !f.allowDisk:
		return command.UsageError("the folder of --into is not in memory, so deleted values could be recovered from the disk: use an emptyDir with medium: Memory or a folder of /run, or pass --allow-disk")
	}
	return nil
}

// connect returns the server, from which the agent reads with a token or an API key.
func (f *agentFlags) connect() (*delivery.Server, error) {
	if f.tokenFile != "" {
		return newServer(f.server.URL, f.caFile)
	}
	key, err := f.server.Resolve(true)
	if err != nil {
		return nil, err
	}
	return newServer(f.server.URL, f.caFile, client.WithAPIKey(key))
}
