package admin

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

// withDryRun gives a command that changes access the flag --dry-run. change returns what the command would
// change, nil for something that takes nothing from anybody.
func withDryRun(cmd *cobra.Command, r *command.Server, change func(context.Context, *client.V2, []string) (*v2.AccessChange, error)) *cobra.Command {
	var dry bool
	cmd.Flags().BoolVar(&dry, "dry-run", false, "change nothing: print who would lose what of what they did in the last 30 days, as the audit log has it")
	run := cmd.RunE
	try := command.NewCall(r, cmd.Use, cmd.Short, cmd.Args,
		func(ctx context.Context, c *client.V2, args []string) (*lossList, error) {
			what, err := change(ctx, c, args)
			if err != nil || what == nil {
				return &lossList{Losses: []lossLine{}}, err
			}
			return tryAccess(ctx, c, *what)
		}, showLosses)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if dry {
			return try.RunE(cmd, args)
		}
		return run(cmd, args)
	}
	return cmd
}

// lossList is what --dry-run prints.
type lossList struct {
	Losses   []lossLine `json:"losses"`
	From     *time.Time `json:"from,omitempty"`
	Unjudged int        `json:"unjudged"`
}

type lossLine struct {
	v2.AccessLoss

	ActorName string `json:"actor_name,omitempty"` // e-mail address of a user, name of an API key
}

// tryAccess reads all pages of a dry run.
func tryAccess(ctx context.Context, c *client.V2, change v2.AccessChange) (*lossList, error) {
	type what struct {
		actor, credential string
		verb              v2.PathVerb
	}
	all, at := &lossList{Losses: []lossLine{}}, map[what]int{}
	for {
		page, err := c.TryAccessChange(ctx, change)
		if err != nil {
			return nil, fmt.Errorf("trying the change: %w", err)
		}
		for _, loss := range page.Losses {
			key := what{loss.Actor.Id, loss.CredentialId, loss.Verb}
			if i, known := at[key]; known { // the newest page came first
				all.Losses[i].Uses += loss.Uses
				continue
			}
			at[key] = len(all.Losses)
			all.Losses = append(all.Losses, lossLine{AccessLoss: loss})
		}
		all.From, all.Unjudged = &page.From, all.Unjudged+page.Unjudged
		if page.NextCursor == nil {
			return all, nameActors(ctx, c, all.Losses)
		}
		change.Cursor = page.NextCursor
	}
}

// nameActors adds what users and API keys are called.
func nameActors(ctx context.Context, c *client.V2, losses []lossLine) error {
	if len(losses) == 0 {
		return nil
	}
	users, err := c.ListMembers(ctx)
	if err != nil {
		return fmt.Errorf("reading who they are: %w", err)
	}
	keys, err := c.ListAPIKeys(ctx)
	if err != nil {
		return fmt.Errorf("reading who they are: %w", err)
	}
	called := make(map[string]string)
	for _, u := range users.Members {
		called[u.UserId] = string(u.Email)
	}
	for _, k := range keys.ApiKeys {
		called[k.KeyId] = k.Name
	}
	for i := range losses {
		losses[i].ActorName = called[losses[i].Actor.Id]
	}
	return nil
}

func showLosses(out, note io.Writer, a *lossList) {
	if len(a.Losses) == 0 {
		fmt.Fprintln(out, "nobody would lose anything that they did in the last 30 days")
	} else {
		var rows [][]string
		for _, l := range a.Losses {
			who, what := l.ActorName, l.CredentialId
			if who == "" {
				who = l.Actor.Id
			}
			if l.Name != nil {
				what = *l.Name
			}
			rows = append(rows, []string{command.Printable(who), string(l.Verb), command.Printable(what), strconv.Itoa(l.Uses), command.Day(&l.LastUsedAt)})
		}
		command.Table(out, "WHO VERB CREDENTIAL USES LAST", rows)
	}
	if a.Unjudged > 0 {
		fmt.Fprintf(note, "not judged: %d uses by ServiceAccounts that were last seen by an earlier release\n", a.Unjudged)
	}
}
