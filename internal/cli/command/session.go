package command

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/latticekeep/latticekeep/api/client"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"
)

// Session holds the flags of a command that signs in as a user of a running server, to do what no API
// key may do.
type Session struct {
	Server              Server
	Email, PasswordFile string
}

func (s *Session) Register(cmd *cobra.Command) {
	s.Server.RegisterAddress(cmd, cmd.Flags(), "base URL of the server")
	cmd.Flags().StringVar(&s.Email, "email", "", "address of the user who acts")
	cmd.Flags().StringVar(&s.PasswordFile, "password-file", "", "file with the user's password (default: the command asks for it)")
	_ = cmd.MarkFlagRequired("email") // cannot fail: the flag exists
}

// Do signs in, lets act use the session, and signs out.
func (s *Session) Do(cmd *cobra.Command, act func(context.Context, *client.V2) error) error {
	if err := s.Server.Locate(); err != nil {
		return err
	}
	if s.Server.URL == "" {
		return UsageError("no server: set --url or " + URLVariable + ", or run latticekeep login")
	}
	password, err := s.password(cmd)
	if err != nil {
		return err
	}
	c, err := client.New(s.Server.URL)
	if err != nil {
		return &StatusError{StatusUsage, err}
	}
	ctx := cmd.Context()
	if _, err := c.V2.Login(ctx, v2.LoginRequest{Email: s.Email, Password: password}); err != nil {
		return fmt.Errorf("signing in: %w", err)
	}
	err = act(ctx, c.V2)
	if out := c.V2.Logout(context.WithoutCancel(ctx)); out != nil {
		err = errors.Join(err, fmt.Errorf("signing out: %w", out))
	}
	return err
}

func (s *Session) password(cmd *cobra.Command) (string, error) {
	if s.PasswordFile != "" {
		b, err := os.ReadFile(s.PasswordFile)
		if err != nil {
			return "", fmt.Errorf("reading the password: %w", err)
		}
		return strings.TrimSuffix(strings.TrimSuffix(string(b), "\n"), "\r"), nil
	}
	b, ok, err := Prompt(cmd, "Password of "+Printable(s.Email))
	switch {
	case !ok:
		return "", UsageError("no password: set --password-file, or run the command in a terminal")
	case err != nil:
		return "", fmt.Errorf("reading the password: %w", err)
	}
	return string(b), nil
}
