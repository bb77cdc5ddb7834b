package command

import (
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"
)

// Int defines a flag that takes whole numbers from low to high. *p stays nil until the flag is
// given, so that a value such as 0 is refused, and not taken for a flag that was left out.
func Int[T int | int32 | int64 | uint64](cmd *cobra.Command, p **T, name string, low, high T, usage string) {
	cmd.Flags().Var(&number[T]{p, low, high}, name, usage)
}

type number[T int | int32 | int64 | uint64] struct {
	p         **T
	low, high T
}

// Set implements pflag.Value.
func (n *number[T]) Set(text string) error {
	i, err := strconv.ParseInt(text, 10, 64)
	if err != nil || i < int64(n.low) || i > int64(n.high) {
		return fmt.Errorf("it takes a whole number from %d to %d", n.low, n.high)
	}
	*n.p = new(T(i))
	return nil
}

// String implements pflag.Value.
func (n *number[T]) String() string {
	if n.p == nil || *n.p == nil {
		return ""
	}
	return fmt.Sprint(**n.p)
}

// Type implements pflag.Value.
func (n *number[T]) Type() string { return "int" }

// Duration defines a flag that takes a duration of at least low.
func Duration(cmd *cobra.Command, p *time.Duration, name string, value, low time.Duration, usage string) {
	*p = value
	cmd.Flags().Var(&duration{p, low}, name, usage)
}

type duration struct {
	p   *time.Duration
	low time.Duration
}

// Set implements pflag.Value.
func (d *duration) Set(text string) error {
	t, err := time.ParseDuration(text)
	if err != nil || t < d.low {
		return fmt.Errorf("it takes a duration of at least %v, such as 30s or 5m", d.low)
	}
	*d.p = t
	return nil
}

// String implements pflag.Value.
func (d *duration) String() string {
	if d.p == nil {
		return ""
	}
	return d.p.String()
}

// Type implements pflag.Value.
func (d *duration) Type() string { return "duration" }
