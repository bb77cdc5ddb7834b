package vault

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
	"github.com/latticekeep/latticekeep/internal/cli/command"
)

// completionTime bounds what somebody waits for after the Tab key.
const completionTime = 2 * time.Second

// completeNames has a shell complete the first argument with the names of credentials, those of the
// first page. Without an answer there is nothing to complete.
func completeNames(r *command.Server) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, begin string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return namesLike(cmd, r, begin), cobra.ShellCompDirectiveNoFileComp
	}
}

// namesLike returns names of credentials that begin so, as far as a shell can take them.
func namesLike(cmd *cobra.Command, r *command.Server, begin string) (found []cobra.Completion) {
	c, err := r.Client()
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), completionTime)
	defer cancel()
	p := v2.ListCredentialsParams{Limit: new(pageSize)}
	if begin != "" {
		p.Prefix = &begin
	}
	page, err := c.ListCredentials(ctx, &p)
	if err != nil {
		return nil
	}
	for _, credential := range page.Credentials {
		// A shell would act on other characters of a name.
		if strings.HasPrefix(credential.Name, begin) && command.Printable(credential.Name) == credential.Name && !strings.ContainsAny(credential.Name, " \t'\"\\`$&|;<>()*?[]{}!#~") {
			found = append(found, credential.Name)
		}
	}
	return found
}
