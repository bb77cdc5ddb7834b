package vault

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

func newEditCommand() *cobra.Command {
	var r command.Server
	cmd := &cobra.Command{
		Use:   "edit NAME",
		Short: "Change the values of a credential in an editor",
		Long: `Open the values of a credential as YAML in the editor of VISUAL or EDITOR, and store
what was changed as the next version: a line that is gone removes its key. Nothing is
stored when nothing was changed. It keeps what somebody else stores meanwhile; when
both have changed the same key, the text can be edited again.

The text is in a file of mode 0600 in memory (tmpfs: XDG_RUNTIME_DIR or /dev/shm) and
removed at the end. An editor may keep copies elsewhere. The API key needs the scopes
vault:read and vault:write.`,
		Example: `  EDITOR=nano latticekeep edit shop/db`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			editor := cmp.Or(os.Getenv("VISUAL"), os.Getenv("EDITOR"))
			if editor == "" {
				return command.UsageError("no editor: set EDITOR, as in EDITOR=nano latticekeep edit NAME")
			}
			c, err := r.Client()
			if err != nil {
				return err
			}
			// Ctrl-C belongs to the editor. The text is removed whatever happens.
			return edit(context.WithoutCancel(cmd.Context()), cmd, c, editor, args[0])
		},
	}
	r.RegisterConnection(cmd)
	cmd.ValidArgsFunction = completeNames(&r)
	return cmd
}

// edit has the values changed in an editor until they are stored, or somebody gives up. What somebody else
// has stored meanwhile stays; for a key that both have changed, the text is edited again.
func edit(ctx context.Context, cmd *cobra.Command, c *client.V2, editor, name string) error {
	var tag string
	o, err := open(ctx, c, name, client.EntityTag(&tag))
	if err != nil {
		return err
	}
	defer func() { o.values.zero() }() // those that were read last
	for text := o.values.strings(); ; {
		if err := o.checkText(name); err != nil {
			return err
		}
		edited, err := inEditor(ctx, cmd, editor, text)
		if err != nil {
			return err
		}
		r := v2.PatchRequest{Values: changes(o.values, edited)}
		if len(r.Values) == 0 {
			_, err := fmt.Fprintln(cmd.ErrOrStderr(), "nothing changed, and nothing stored")
			return err
		}
		for both := []string(nil); len(both) == 0; {
			answer, err := c.PatchCredential(ctx, o.id, r, client.IfMatch(tag))
			if err == nil {
				printCredentials(cmd.OutOrStdout(), credentialOf(answer))
				return nil
			}
			if !errors.Is(err, client.ErrPreconditionFailed) {
				return fmt.Errorf("storing %s: %w", command.Printable(name), err)
			}
			now, err := open(ctx, c, o.id, client.EntityTag(&tag))
			if err != nil {
				return err
			}
			for key := range r.Values {
				was, had := o.values[key]
				is, has := now.values[key]
				if had != has || !bytes.Equal(was, is) {
					both = append(both, command.Printable(key))
				}
			}
			o.values.zero()
			o = now
			slices.Sort(both)
			if len(both) == 0 {
				continue
			}
			err = fmt.Errorf("somebody else has changed %s of %s meanwhile, so nothing is stored", strings.Join(both, ", "), command.Printable(name))
			if !command.IsTerminal(cmd.InOrStdin()) {
				return err
			}
			fmt.Fprintln(cmd.ErrOrStderr(), err)
		}
		if err := command.Confirm(cmd, "Type again to go on editing, with your values in place of theirs", "again"); err != nil {
			return err
		}
		text = o.values.strings()
		for key, value := range r.Values {
			if delete(text, key); value != nil {
				text[key] = *value
			}
		}
	}
}

// changes returns what makes the edited values of v, as a request has it: nil removes a key.
func changes(v values, edited map[string]string) map[string]*string {
	all := make(map[string]*string)
	for key, value := range edited {
		if was, ok := v[key]; !ok || string(was) != value {
			all[key] = &value
		}
	}
	for key := range v {
		if _, ok := edited[key]; !ok {
			all[key] = nil
		}
	}
	return all
}

// inEditor returns the values as somebody leaves them in an editor. A text that cannot be read is
// edited again, if somebody is there who says so.
func inEditor(ctx context.Context, cmd *cobra.Command, editor string, v map[string]string) (map[string]string, error) {
	text, err := yaml.Marshal(v)
	if err != nil {
		return nil, err
	}
	defer clear(text)
	dir, err := folderInMemory()
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	file := filepath.Join(dir, "values.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return nil, err
	}
	for {
		e := exec.CommandContext(ctx, "sh", "-c", editor+` "$1"`, "sh", file)
		e.Stdin, e.Stdout, e.Stderr = cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr()
		if err := e.Run(); err != nil {
			return nil, fmt.Errorf("running the editor, so nothing is stored: %w", err)
		}
		saved, err := command.ReadFile(file, maxInput)
		if err != nil {
			return nil, err
		}
		edited, err := parseValues(saved)
		saved.Zero()
		if err == nil || !command.IsTerminal(cmd.InOrStdin()) {
			return edited, err
		}
		fmt.Fprintln(cmd.ErrOrStderr(), err)
		if err := command.Confirm(cmd, "Type again to go on editing", "again"); err != nil {
			return nil, err
		}
	}
}

// yamlLine matches the line number in an error of the YAML parser, whose words may quote a value.
var yamlLine = regexp.MustCompile(`line [0-9]+`)

func parseValues(text []byte) (map[string]string, error) {
	var object map[string]any
	if err := yaml.UnmarshalStrict(text, &object); err != nil {
		return nil, command.UsageError("the text is not YAML of KEY: VALUE: look at " + cmp.Or(yamlLine.FindString(err.Error()), "its keys"))
	}
	if len(object) == 0 {
		return nil, command.UsageError("no value is left: latticekeep rm deletes a credential")
	}
	edited := make(map[string]string)
	for key, value := range object {
		s, ok := value.(string)
		if !ok {
			return nil, command.UsageError("the value of " + command.Printable(key) + " is not text: put it into quotes")
		}
		edited[key] = s
	}
	return edited, nil
}

// tmpfs is the magic number of file systems in memory (statfs(2)).
const tmpfs = 0x01021994

// folderInMemory makes a folder that never reaches a disk, except by swapping.
func folderInMemory() (string, error) {
	for _, dir := range []string{os.Getenv("XDG_RUNTIME_DIR"), "/dev/shm"} {
		var s syscall.Statfs_t
		if dir == "" || syscall.Statfs(dir, &s) != nil || int64(s.Type) != tmpfs {
			continue
		}
		if made, err := os.MkdirTemp(dir, "latticekeep-edit-"); err == nil {
			return made, nil
		}
	}
	return "", errors.New("there is no folder in memory for the text (tmpfs at XDG_RUNTIME_DIR or /dev/shm): use latticekeep get and put")
}
