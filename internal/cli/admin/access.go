package admin

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/authz"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

func NewAccessCommand() *cobra.Command {
	var r command.Server
	return command.NewGroup("access", "Say who may reach which credentials, on a running server",
		`Limit users, API keys and ServiceAccounts to some paths. A policy allows verbs (list,
read, write, delete) on the names that a glob matches, and whoever it is bound to may
do no more than that. A POLICY is named by its name or its id; a SUBJECT by the e-mail
address of a user, the name of a group, the id of a user, a group or an API key, or
system:serviceaccount:<namespace>:<name>. The API key needs the scope account:admin;
check needs none.`, &r,
		newPutPolicyCommand(&r),
		command.NewCall(&r, "list", "List the policies, and who has which", cobra.NoArgs,
			func(ctx context.Context, c *client.V2, _ []string) (*v2.PolicyList, error) {
				return c.ListPolicies(ctx)
			}, showPolicies),
		command.NewCall(&r, "delete POLICY", "Delete a policy that is bound to nobody", cobra.ExactArgs(1),
			func(ctx context.Context, c *client.V2, args []string) (done, error) {
				ids, err := policyIDs(ctx, c, args)
				if err != nil {
					return done{}, err
				}
				return done{ids[0], "deleted"}, c.DeletePolicy(ctx, ids[0])
			}, showDone),
		newBindCommand(&r),
		withDryRun(command.NewCall(&r, "unbind SUBJECT", "Take all policies of a subject away: no policy limits it any more", cobra.ExactArgs(1),
			func(ctx context.Context, c *client.V2, args []string) (done, error) {
				subject, err := subjectOf(ctx, c, args[0])
				if err != nil {
					return done{}, err
				}
				return done{subject, "has all paths"}, c.UnbindPolicies(ctx, subject)
			}, showDone), &r, tryUnbind),
		newCheckCommand(&r))
}

func newPutPolicyCommand(r *command.Server) *cobra.Command {
	var allow []string
	cmd := command.NewCall(r, "put NAME", "Make a policy, or give one other rules", cobra.ExactArgs(1),
		func(ctx context.Context, c *client.V2, args []string) (*v2.PolicyAnswer, error) {
			rules, err := parseRules(allow)
			if err != nil {
				return nil, err
			}
			body := v2.PolicyRequest{Name: args[0], Rules: rules}
			all, err := c.ListPolicies(ctx)
			if err != nil {
				return nil, err
			}
			if id := idOfPolicy(all.Policies, args[0]); id != "" {
				return c.ChangePolicy(ctx, id, body)
			}
			return c.CreatePolicy(ctx, body)
		}, func(out, _ io.Writer, a *v2.PolicyAnswer) {
			fmt.Fprintln(out, a.Policy.PolicyId, command.Printable(a.Policy.Name), rulesText(a.Policy.Rules))
		})
	cmd.Long = `Make a policy, or give the one of this name the rules that --allow names, in place of
those that it has. They count from the next request on.`
	cmd.Example = `  latticekeep access put shop --allow 'shop/prod/**=list,read' --allow 'shop/test/**=list,read,write,delete'`
	cmd.Flags().StringArrayVar(&allow, "allow", nil, "rule GLOB=VERB,VERB: * is one segment of a path, ** at the end all that follow; verbs are list, read, write and delete; may be repeated")
	_ = cmd.MarkFlagRequired("allow") // cannot fail: the flag exists
	return withDryRun(cmd, r, func(ctx context.Context, c *client.V2, args []string) (*v2.AccessChange, error) {
		rules, err := parseRules(allow)
		if err != nil {
			return nil, err
		}
		all, err := c.ListPolicies(ctx)
		if err != nil {
			return nil, err
		}
		id := idOfPolicy(all.Policies, args[0])
		if id == "" {
			return nil, nil // nobody has a policy that is new
		}
		return &v2.AccessChange{Change: v2.AccessChangeChangeChangePolicy, PolicyId: &id, Rules: &rules}, nil
	})
}

// parseRules reads rules as --allow has them.
func parseRules(texts []string) ([]v2.PolicyRuleRequest, error) {
	rules := []v2.PolicyRuleRequest{}
	for _, text := range texts {
		rule, err := parseRule(text)
		if err != nil {
			return nil, err
		}
		rules = append(rules, rule)
	}
	return rules, nil
}

// parseRule reads a rule as --allow has it. A glob may contain the sign that ends it.
func parseRule(text string) (v2.PolicyRuleRequest, error) {
	at := strings.LastIndex(text, "=")
	if at < 1 || at == len(text)-1 {
		return v2.PolicyRuleRequest{}, command.UsageError(fmt.Sprintf("--allow is %q: write GLOB=VERB,VERB, such as shop/**=list,read", text))
	}
	rule := v2.PolicyRuleRequest{Path: text[:at]}
	for verb := range strings.SplitSeq(text[at+1:], ",") {
		if !slices.Contains(authz.Verbs(), authz.Verb(verb)) {
			return v2.PolicyRuleRequest{}, command.UsageError(fmt.Sprintf("--allow is %q: its verbs are of list, read, write and delete", text))
		}
		rule.Verbs = append(rule.Verbs, v2.PathVerb(verb))
	}
	return rule, nil
}

func newBindCommand(r *command.Server) *cobra.Command {
	cmd := command.NewCall(r, "bind SUBJECT [POLICY]...", "Give a subject these policies in place of those that it has", cobra.MinimumNArgs(1),
		func(ctx context.Context, c *client.V2, args []string) (*v2.BindingAnswer, error) {
			subject, ids, err := bindingOf(ctx, c, args)
			if err != nil {
				return nil, err
			}
			return c.BindPolicies(ctx, subject, v2.BindingRequest{Policies: ids})
		}, func(out, _ io.Writer, a *v2.BindingAnswer) {
			what := "may do nothing on any path"
			if n := len(a.Binding.Policies); n > 0 {
				what = fmt.Sprintf("has %d of the policies", n)
			}
			fmt.Fprintln(out, a.Binding.Subject, what)
		})
	cmd.Long = `Give a subject these policies in place of those that it has. It may then do what any
of them allows, and nothing else, from its next request on; without a POLICY it may do
nothing on any path.`
	return withDryRun(cmd, r, func(ctx context.Context, c *client.V2, args []string) (*v2.AccessChange, error) {
		subject, ids, err := bindingOf(ctx, c, args)
		return &v2.AccessChange{Change: v2.AccessChangeChangeBindPolicies, Subject: &subject, Policies: &ids}, err
	})
}

// bindingOf returns the subject and the policies that the arguments of bind name.
func bindingOf(ctx context.Context, c *client.V2, args []string) (subject string, policies []string, err error) {
	if subject, err = subjectOf(ctx, c, args[0]); err != nil {
		return "", nil, err
	}
	policies, err = policyIDs(ctx, c, args[1:])
	return subject, policies, err
}

func tryUnbind(ctx context.Context, c *client.V2, args []string) (*v2.AccessChange, error) {
	subject, err := subjectOf(ctx, c, args[0])
	return &v2.AccessChange{Change: v2.AccessChangeChangeUnbindPolicies, Subject: &subject}, err
}

func newCheckCommand(r *command.Server) *cobra.Command {
	var subject string
	cmd := &cobra.Command{
		Use: "check PATH VERB", Short: "Say whether scopes and policies allow a verb on a path", Args: cobra.ExactArgs(2),
		Long: `Say whether scopes and policies allow a verb (list, read, write or delete) on a path,
to whoever asks, or to --subject. The path is judged as text: the answer does not tell
whether a credential is there. The exit status is 0 for yes, and 4 for no.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			c, err := r.Client()
			if err != nil {
				return err
			}
			question := v2.AccessCheckRequest{Path: args[0], Verb: v2.PathVerb(args[1])}
			if subject != "" {
				id, err := subjectOf(cmd.Context(), c, subject)
				if err != nil {
					return err
				}
				question.Subject = &id
			}
			answer, err := c.CheckAccess(cmd.Context(), question)
			if err != nil {
				return err
			}
			if r.JSON {
				err = command.PrintJSON(cmd.OutOrStdout(), answer)
			} else if answer.Allowed {
				_, err = fmt.Fprintln(cmd.OutOrStdout(), "yes")
			}
			if err != nil || answer.Allowed {
				return err
			}
			no := "no"
			if answer.Reason != nil {
				no += ": " + string(*answer.Reason)
			}
			return &command.StatusError{Status: command.StatusRefused, Err: fmt.Errorf("%s", no)}
		},
	}
	cmd.Flags().StringVar(&subject, "subject", "", "who is asked about (default whoever asks)")
	cmd.ValidArgsFunction = func(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		var verbs []cobra.Completion
		if len(args) == 1 {
			for _, v := range authz.Verbs() {
				verbs = append(verbs, string(v))
			}
		}
		return verbs, cobra.ShellCompDirectiveNoFileComp
	}
	return cmd
}

func showPolicies(out, _ io.Writer, a *v2.PolicyList) {
	names := make(map[string]string)
	var rows [][]string
	for _, p := range a.Policies {
		names[p.PolicyId] = command.Printable(p.Name)
		rows = append(rows, []string{names[p.PolicyId], p.PolicyId, rulesText(p.Rules)})
	}
	command.Table(out, "POLICY ID ALLOWS", rows)
	if len(a.Bindings) == 0 {
		return
	}
	rows = nil
	for _, b := range a.Bindings {
		var has []string
		for _, id := range b.Policies {
			has = append(has, names[id])
		}
		if has == nil {
			has = []string{"-"}
		}
		rows = append(rows, []string{b.Subject, command.Day(&b.BoundAt), strings.Join(has, ", ")})
	}
	fmt.Fprintln(out)
	command.Table(out, "SUBJECT SINCE POLICIES", rows)
}

// rulesText returns rules as --allow takes them.
func rulesText(rules []v2.PolicyRule) string {
	var all []string
	for _, r := range rules {
		var verbs []string
		for _, v := range r.Verbs {
			verbs = append(verbs, string(v))
		}
		all = append(all, command.Printable(r.Path)+"="+strings.Join(verbs, ","))
	}
	return strings.Join(all, " ")
}

// idOfPolicy returns the id of a policy that is named by its name or its id, or "" if there is none.
func idOfPolicy(all []v2.Policy, name string) string {
	for _, p := range all {
		if p.Name == name || p.PolicyId == name {
			return p.PolicyId
		}
	}
	return ""
}

// policyIDs returns the ids of policies.
func policyIDs(ctx context.Context, c *client.V2, names []string) ([]string, error) {
	ids := []string{}
	if len(names) == 0 {
		return ids, nil
	}
	all, err := c.ListPolicies(ctx)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		id := idOfPolicy(all.Policies, name)
		if id == "" {
			return nil, &command.StatusError{Status: command.StatusRefused, Err: fmt.Errorf("there is no policy %s: latticekeep access list lists them", command.Printable(name))}
		}
		ids = append(ids, id)
	}
	return ids, nil
}
