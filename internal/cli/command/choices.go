package command

import "github.com/spf13/cobra"

// Choices has a shell complete a flag with the values that it takes.
func Choices[T ~string](cmd *cobra.Command, flag string, values ...T) {
	texts := make([]string, len(values))
	for i, v := range values {
		texts[i] = string(v)
	}
	// It fails only for a flag that is not defined, and tests complete every flag.
	_ = cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(texts, cobra.ShellCompDirectiveNoFileComp))
}
