package vault

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

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
stored when nothing was changed. It keeps what somebody else stores meanwhile. When both
have changed the same key, the text can be edited again: it has both values, between
marks as git makes them, and is not stored while a mark is left. So can a text that the
server refuses.

The text is in a file of mode 0600: on Linux in memory (tmpfs: XDG_RUNTIME_DIR or
/dev/shm), on macOS in your temporary folder, whose disk may keep traces of it. It is
removed at the end, also when the terminal closes (SIGHUP) or at SIGTERM or SIGQUIT,
which end the editor. After SIGKILL, or on macOS a loss of power, it stays until you run
latticekeep edit again. An editor may keep copies elsewhere. The API key needs the scopes
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
			ctx, stop := untilEnded(cmd.Context())
			defer stop()
			err = edit(ctx, cmd, c, editor, args[0])
			if err != nil && ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			return err
		},
	}
	r.RegisterConnection(cmd)
	cmd.ValidArgsFunction = completeNames(&r)
	return cmd
}

// untilEnded returns a context that ends when somebody ends this process, or its terminal closes, so that
// the text is removed first. Ctrl-C belongs to the editor, however often somebody types it.
func untilEnded(former context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(former))
	ends, typed := make(chan os.Signal, 1), make(chan os.Signal, 1)
	signal.Notify(ends, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGTERM)
	signal.Notify(typed, os.Interrupt)
	go func() {
		select {
		case s := <-ends:
			cancel(fmt.Errorf("ended by a signal (%s), so nothing is stored", s))
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		signal.Stop(ends)
		signal.Stop(typed)
		cancel(nil)
	}
}

// edit has the values changed in an editor until they are stored, or somebody gives up.
func edit(ctx context.Context, cmd *cobra.Command, c *client.V2, program, name string) error {
	var tag string
	o, err := open(ctx, c, name, client.EntityTag(&tag))
	if err != nil {
		return err
	}
	defer func() { o.values.zero() }()
	if err := o.checkText(name); err != nil {
		return err
	}
	text, err := merge(o.values, nil, nil)
	if err != nil {
		return err
	}
	e, err := newEditor(cmd, program, text)
	if err != nil {
		return err
	}
	defer e.close()
	for {
		edited, err := e.edit(ctx)
		if err != nil {
			return err
		}
		r := v2.PatchRequest{Values: changes(o.values, edited)}
		if len(r.Values) == 0 {
			_, err := fmt.Fprintln(cmd.ErrOrStderr(), "nothing changed, and nothing stored")
			return err
		}
		answer, both, err := o.change(ctx, c, &tag, r.Values)
		if answer != nil {
			printCredentials(cmd.OutOrStdout(), credentialOf(answer))
			return nil
		}
		if err != nil {
			err = fmt.Errorf("storing %s: %w", command.Printable(name), err)
		} else {
			err = fmt.Errorf("somebody else has changed %s of %s meanwhile, so nothing is stored", command.Printable(strings.Join(both, ", ")), command.Printable(name))
		}
		if err := e.again(ctx, err); err != nil {
			return err
		}
		text, err := merge(o.values, r.Values, both)
		if err != nil {
			return err
		}
		if err := e.write(text); err != nil {
			return err
		}
	}
}

// change stores changes to o. What somebody else has stored meanwhile stays, and is then in o. When both
// have changed the same keys, it stores nothing and returns those.
func (o *opened) change(ctx context.Context, c *client.V2, tag *string, all map[string]*string) (answer *v2.CredentialAnswer, both []string, err error) {
	for len(both) == 0 {
		answer, err = c.PatchCredential(ctx, o.id, v2.PatchRequest{Values: all}, client.IfMatch(*tag))
		if !errors.Is(err, client.ErrPreconditionFailed) {
			return answer, nil, err
		}
		now, err := open(ctx, c, o.id, client.EntityTag(tag))
		if err != nil {
			return nil, nil, err
		}
		if err := now.checkText(o.id); err != nil {
			now.values.zero()
			return nil, nil, err
		}
		theirs := changes(o.values, now.values.strings())
		for key, mine := range all {
			if is, ok := theirs[key]; ok && (is == nil || mine == nil || *is != *mine) && is != mine {
				both = append(both, key)
			}
		}
		o.values.zero()
		*o = *now
	}
	slices.Sort(both)
	return nil, both, nil
}

// changes returns what makes a credential with values from one with former, as a patch does.
func changes(former values, edited map[string]string) map[string]*string {
	all := make(map[string]*string)
	for key, value := range edited {
		if former, ok := former[key]; !ok || string(former) != value {
			all[key] = &value
		}
	}
	for key := range former {
		if _, ok := edited[key]; !ok {
			all[key] = nil
		}
	}
	return all
}

// marks matches the lines that merge puts around both sides of a conflict, which are those of git. Values
// of several lines are indented.
var marks = regexp.MustCompile(`(?m)^(<<<<<<<|=======|>>>>>>>)`)

// merge returns the text of values with changes to them. For the keys of both, which somebody else has
// changed, too, it has both sides in marks. Those are no YAML, so nothing is stored that nobody has looked at.
// It fails for a value that would be another one, or gone, in what is read from the text.
func merge(theirs values, mine map[string]*string, both []string) (text []byte, err error) {
	if len(both) > 0 {
		text = []byte("# Somebody else has changed this credential meanwhile. Between marks, leave the lines\n" +
			"# of one side, and remove the marks.\n")
	}
	line := func(key string, value *string) {
		if value == nil || err != nil {
			return
		}
		var y []byte
		if y, err = asText(key, *value); err == nil {
			text = append(text, y...)
		}
		clear(y)
	}
	sides := make(map[string][2]*string) // mine and theirs
	for key, value := range theirs.strings() {
		sides[key] = [2]*string{&value, &value}
	}
	for key, value := range mine {
		sides[key] = [2]*string{value, sides[key][1]}
	}
	for _, key := range slices.Sorted(maps.Keys(sides)) {
		side := sides[key]
		if !slices.Contains(both, key) {
			line(key, side[0])
			continue
		}
		text = append(text, "<<<<<<< yours\n"...)
		line(key, side[0])
		text = append(text, "=======\n"...)
		line(key, side[1])
		text = append(text, ">>>>>>> theirs\n"...)
	}
	if err != nil {
		clear(text)
		return nil, err
	}
	return text, nil
}

// asText returns the YAML of one value. That of some characters, such as U+0085, cannot be read, or is read
// as another value.
func asText(key, value string) ([]byte, error) {
	y, err := yaml.Marshal(map[string]string{key: value})
	if err == nil {
		var read map[string]string
		if read, err = parseValues(y); err == nil && (len(read) != 1 || read[key] != value) {
			err = errors.New("it is read as another value")
		}
	}
	if err != nil { // whose words may quote the value
		clear(y)
		return nil, &command.StatusError{Status: command.StatusFailed, Err: fmt.Errorf("the value of %s cannot be edited as text: get it to a file and put it", command.Printable(key))}
	}
	return y, nil
}

// editor is a text that somebody edits.
type editor struct {
	cmd       *cobra.Command
	program   string
	dir, file string
	lock      *os.File // while it is locked this process edits the text
}

// newEditor stores a text for program, and zeroes it.
func newEditor(cmd *cobra.Command, program string, text []byte) (*editor, error) {
	removeLeft(runtime.GOOS)
	dir, err := privateFolder(runtime.GOOS)
	if err != nil {
		clear(text)
		return nil, err
	}
	e := &editor{cmd: cmd, program: program, dir: dir, file: filepath.Join(dir, textFile)}
	if e.lock, err = lockFolder(dir); err == nil {
		err = e.write(text)
	}
	clear(text)
	if err != nil {
		e.close()
		return nil, err
	}
	return e, nil
}

// write replaces the text with another one, which it zeroes.
func (e *editor) write(text []byte) error {
	defer clear(text)
	return os.WriteFile(e.file, text, 0o600)
}

// close removes the text. Zeros go over it first, which on a disk may reach another place than it was at.
func (e *editor) close() {
	if f, err := os.OpenFile(e.file, os.O_WRONLY|syscall.O_NOFOLLOW, 0); err == nil {
		if s, err := f.Stat(); err == nil {
			_, _ = f.Write(make([]byte, s.Size()))
			_ = f.Sync()
		}
		_ = f.Close()
	}
	_ = os.RemoveAll(e.dir)
	_ = e.lock.Close()
}

// Names in the folder of a text.
const (
	textFile = "values.yaml"
	lockFile = "lock"
)

// lockFolder makes the lock of a folder, which the kernel opens when this process ends. It gets its name
// when it is locked, so that no other process ever sees it open.
func lockFolder(dir string) (*os.File, error) {
	made := filepath.Join(dir, lockFile+".new")
	f, err := os.OpenFile(made, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	if err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err == nil {
		err = os.Rename(made, filepath.Join(dir, lockFile))
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// removeLeft removes the texts of this user's processes that were killed.
func removeLeft(goos string) {
	for _, parent := range privateParents(goos) {
		found, _ := filepath.Glob(filepath.Join(parent, folderPrefix+"*")) // fails for a bad pattern only
		for _, dir := range found {
			info, err := os.Lstat(dir)
			if err != nil || !info.IsDir() {
				continue
			}
			if s, ok := info.Sys().(*syscall.Stat_t); !ok || int(s.Uid) != os.Getuid() {
				continue
			}
			lock, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_WRONLY|syscall.O_NOFOLLOW, 0)
			if err != nil {
				continue
			}
			if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
				_ = lock.Close()
				continue
			}
			(&editor{dir: dir, file: filepath.Join(dir, textFile), lock: lock}).close()
		}
	}
}

// edit returns the values as somebody leaves them. A text that cannot be read is edited again, if somebody
// is there who says so.
func (e *editor) edit(ctx context.Context) (map[string]string, error) {
	for {
		p := exec.CommandContext(ctx, "sh", "-c", e.program+` "$1"`, "sh", e.file)
		p.Stdin, p.Stdout, p.Stderr = e.cmd.InOrStdin(), e.cmd.OutOrStdout(), e.cmd.ErrOrStderr()
		p.Cancel = func() error { return p.Process.Signal(syscall.SIGHUP) } // as a terminal that closes
		p.WaitDelay = patience
		err := p.Run()
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		if err != nil {
			return nil, fmt.Errorf("running the editor, so nothing is stored: %w", err)
		}
		saved, err := command.ReadFile(e.file, maxInput)
		if err != nil {
			return nil, err
		}
		edited, err := parseValues(saved)
		saved.Zero()
		if err == nil {
			return edited, nil
		}
		if err := e.again(ctx, err); err != nil {
			return nil, err
		}
	}
}

// patience is for how long an editor may end by itself.
const patience = 2 * time.Second

// again returns nil if somebody, who is told of err, goes on editing the text.
func (e *editor) again(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if !command.IsTerminal(e.cmd.InOrStdin()) {
		return err
	}
	fmt.Fprintln(e.cmd.ErrOrStderr(), err)
	answer := make(chan error, 1)
	go func() { answer <- command.Confirm(e.cmd, "Type again to go on editing", "again") }()
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// yamlLine matches the line number in an error of the YAML parser, whose words may quote a value.
var yamlLine = regexp.MustCompile(`line [0-9]+`)

func parseValues(text []byte) (map[string]string, error) {
	if marks.Match(text) {
		return nil, command.UsageError("the text has marks <<<<<<<, ======= or >>>>>>>, so nothing is stored: leave the lines of one side, and remove the marks")
	}
	var object map[string]any
	if err := yaml.UnmarshalStrict(text, &object); err != nil {
		return nil, command.UsageError("the text is not YAML of KEY: VALUE: look at " + cmp.Or(yamlLine.FindString(err.Error()), "its keys"))
	}
	if len(object) == 0 {
		return nil, command.UsageError("no value is left: latticekeep rm puts a credential in the trash")
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

// folderPrefix is what the names of folders for texts begin with.
const folderPrefix = "latticekeep-edit-"

// privateParents returns where folders for texts can be. On Linux a text there never reaches a disk, except
// by swapping. Other systems have no file system in memory that anybody can use.
func privateParents(goos string) (parents []string) {
	if goos != "linux" {
		return []string{os.TempDir()}
	}
	for _, dir := range []string{os.Getenv("XDG_RUNTIME_DIR"), "/dev/shm"} {
		var s syscall.Statfs_t
		if dir != "" && syscall.Statfs(dir, &s) == nil && int64(s.Type) == tmpfs {
			parents = append(parents, dir)
		}
	}
	return parents
}

// privateFolder makes a folder of mode 0700 for the text.
func privateFolder(goos string) (string, error) {
	err := errors.New("there is no folder in memory for the text (tmpfs at XDG_RUNTIME_DIR or /dev/shm): use latticekeep get and put")
	for _, parent := range privateParents(goos) {
		made, failed := os.MkdirTemp(parent, folderPrefix)
		if failed == nil {
			return made, nil
		}
		if goos != "linux" {
			err = failed
		}
	}
	return "", err
}
