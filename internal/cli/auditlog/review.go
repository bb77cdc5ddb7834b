package auditlog

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

var reviewSubjects = []string{string(v2.ReviewSubjectDenials), string(v2.ReviewSubjectAccess), string(v2.ReviewSubjectInventory)}

func newReviewCommand() *cobra.Command {
	var s command.Session
	var note string
	var json bool
	cmd := &cobra.Command{
		Use:   "review [denials|access|inventory] --url URL --email ADDRESS",
		Short: "Show what waits for a review, or record that you reviewed it",
		Long: `Without an argument, show what waits for a review by the user, and when members last
reviewed what. With one, record in the log that the user looked at:

  denials    all entries up to now that nobody has acknowledged
  access     the API keys and members of the tenant
  inventory  the inventory of cryptography

Compliance scores count these reviews, and do not count reads. Only a user can review,
no API key can, and nobody acknowledges denials and failures of their own or of API keys
that they made. The note is kept beside the log, and an owner or admin can erase it.`,
		ValidArgs: reviewSubjects,
		Args:      cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			subject := ""
			if len(args) == 1 {
				subject = args[0]
			}
			switch {
			case subject != "" && !slices.Contains(reviewSubjects, subject):
				return command.UsageError(fmt.Sprintf("there is nothing called %q to review: it is one of %s", subject, strings.Join(reviewSubjects, ", ")))
			case subject == "" && note != "":
				return command.UsageError("--note is for a review: say of what")
			}
			return s.Do(cmd, func(ctx context.Context, c *client.V2) error {
				waiting, err := c.GetReviews(ctx)
				if err != nil {
					return fmt.Errorf("asking what waits: %w", err)
				}
				if subject == "" {
					return show(cmd.OutOrStdout(), json, waiting, showWaiting)
				}
				r := v2.ReviewRequest{Subject: v2.ReviewSubject(subject)}
				if r.Subject == v2.ReviewSubjectDenials {
					r.From, r.To = &waiting.From, &waiting.To
				}
				if note != "" {
					r.Note = &note
				}
				done, err := c.CreateReview(ctx, r)
				if err != nil {
					return fmt.Errorf("recording the review: %w", err)
				}
				return show(cmd.OutOrStdout(), json, done, showReview)
			})
		},
	}
	s.Register(cmd)
	cmd.Flags().StringVar(&note, "note", "", "what you found or did, up to 2000 characters")
	cmd.Flags().BoolVar(&json, "json", false, "print the answer as the server sent it")
	return cmd
}

func show[T any](out io.Writer, json bool, answer T, text func(io.Writer, T)) error {
	if json {
		return command.PrintJSON(out, answer)
	}
	text(out, answer)
	return nil
}

func showWaiting(out io.Writer, w *v2.ReviewsWaiting) {
	fmt.Fprintf(out, "waiting for you: %d denials, %d failures (entries %d to %d)\n", w.Denials, w.Failures, w.From, w.To)
	fmt.Fprintf(out, "waiting for another member: %d denials, %d failures\n", w.OwnDenials, w.OwnFailures)
	for _, r := range []struct {
		what string
		at   *time.Time
	}{{"log", w.LogReviewedAt}, {"access", w.AccessReviewedAt}, {"inventory", w.InventoryReviewedAt}} {
		fmt.Fprintf(out, "last review of %s: %s\n", r.what, command.Day(r.at))
	}
}

func showReview(out io.Writer, r *v2.Review) {
	if r.Subject == v2.ReviewSubjectDenials {
		fmt.Fprintf(out, "recorded as entry %d: %d denials and %d failures acknowledged, %d left for another member\n",
			r.Sequence, r.Denials, r.Failures, r.OwnDenials+r.OwnFailures)
	} else {
		fmt.Fprintf(out, "recorded as entry %d: %d items\n", r.Sequence, r.Count)
	}
}
