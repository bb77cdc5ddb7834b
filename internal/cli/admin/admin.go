// Package admin provides the commands that administer a running server: tenants, API keys, members,
// sealing keys and KMS keys.
package admin

import (
	"fmt"
	"io"
)

// done is the output of a command whose call returns nothing.
type done struct {
	ID   string `json:"id"`
	What string `json:"done"`
}

func showDone(out, _ io.Writer, d done) { fmt.Fprintln(out, d.ID, d.What) }
