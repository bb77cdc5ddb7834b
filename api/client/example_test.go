package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	v1 "github.com/latticekeep/latticekeep/api/openapi/v1"
	v2 "github.com/latticekeep/latticekeep/api/openapi/v2"

	"github.com/latticekeep/latticekeep/api/client"
)

// The examples use a development server. BASE and KEY hold its address and key, as the command
// latticekeep server --dev prints them.

// Store a credential and read it back.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := client.New(os.Getenv("BASE"), client.WithAPIKey(os.Getenv("KEY")))
	if err != nil {
		log.Fatal(err)
	}
	days := 30
	sealed, err := c.V2.SealCredential(ctx, v2.SealRequest{
		Name: "payments-api", CredentialType: "api_key", Values: map[string]string{"key": "example-value"}, TtlDays: &days,
	}, nil)
	if err != nil {
		log.Fatal(err)
	}
	unsealed, err := c.V2.UnsealCredential(ctx, sealed.CredentialId)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(unsealed.Name, unsealed.Version, unsealed.Values["key"])
	// Output: payments-api 1 example-value
}

// Errors tell the kind of refusal and the request to ask about.
func ExampleError() {
	ctx := context.Background()
	c, err := client.New(os.Getenv("BASE"), client.WithAPIKey(os.Getenv("KEY")))
	if err != nil {
		log.Fatal(err)
	}
	_, err = c.V2.UnsealCredential(ctx, "cred_of_nobody")
	var refused *client.Error
	if errors.As(err, &refused) && errors.Is(err, client.ErrForbidden) {
		fmt.Println(refused.Status, refused.RequestID != "")
	}
	// Output: 403 true
}

// Encrypt data, and decrypt it from the three parts of the answer.
func ExampleV2_EncryptData() {
	ctx := context.Background()
	c, err := client.New(os.Getenv("BASE"), client.WithAPIKey(os.Getenv("KEY")))
	if err != nil {
		log.Fatal(err)
	}
	e, err := c.V2.EncryptData(ctx, v2.EncryptRequest{Data: "attack at dawn"})
	if err != nil {
		log.Fatal(err)
	}
	d, err := c.V2.DecryptData(ctx, v2.DecryptRequest{CiphertextKem: e.CiphertextKem, CiphertextData: e.CiphertextData, Nonce: e.Nonce})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(e.Algorithm, d.Data)
	// Output: ML-KEM-768 attack at dawn
}

// Sign data with both algorithms, and check that a changed text does not verify.
func ExampleV2_SignData() {
	ctx := context.Background()
	c, err := client.New(os.Getenv("BASE"), client.WithAPIKey(os.Getenv("KEY")))
	if err != nil {
		log.Fatal(err)
	}
	s, err := c.V2.SignData(ctx, v2.SignRequest{Data: "pay 10"})
	if err != nil {
		log.Fatal(err)
	}
	for _, text := range []string{"pay 10", "pay 99"} {
		v, err := c.V2.VerifyData(ctx, v2.VerifyRequest{Data: text, PqcSignature: s.PqcSignature, HmacSignature: s.HmacSignature})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(text, v.Valid)
	}
	// Output:
	// pay 10 true
	// pay 99 false
}

// Register a tenant, sign in as its first user, and act as that user.
func ExampleV2_Login() {
	ctx := context.Background()
	c, err := client.New(os.Getenv("BASE"))
	if err != nil {
		log.Fatal(err)
	}
	_, err = c.V2.RegisterUser(ctx, v2.RegisterRequest{
		Email: "owner@example.org", Password: "correct horse battery staple", TenantName: "Example",
	})
	if err != nil && !errors.Is(err, client.ErrConflict) { // the tenant exists already
		log.Fatal(err)
	}
	_, err = c.V2.Login(ctx, v2.LoginRequest{Email: "owner@example.org", Password: "correct horse battery staple"})
	if err != nil {
		log.Fatal(err)
	}
	account, err := c.V2.GetAccount(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(account.Principal.Kind, account.Tenant.Name, account.Tenant.Status)
	if err := c.V2.Logout(ctx); err != nil {
		log.Fatal(err)
	}
	_, err = c.V2.GetAccount(ctx)
	fmt.Println(errors.Is(err, client.ErrUnauthenticated))
	// Output:
	// user Example trial
	// true
}

// Version 1 returns a ciphertext as one string, encrypted with a named key.
func ExampleV1_EncryptData() {
	ctx := context.Background()
	c, err := client.New(os.Getenv("BASE"), client.WithAPIKey(os.Getenv("KEY")))
	if err != nil {
		log.Fatal(err)
	}
	key, err := c.V1.GenerateKey(ctx, v1.GenerateKeyRequest{Algorithm: "ML-KEM-768", Name: "invoices"})
	if err != nil {
		log.Fatal(err)
	}
	e, err := c.V1.EncryptData(ctx, v1.EncryptRequest{Data: "attack at dawn", Algorithm: "ML-KEM-768", KeyId: &key.KeyId})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := c.V1.RotateKey(ctx, key.KeyId, v1.RotateKeyRequest{}); err != nil {
		log.Fatal(err)
	}
	e, err = c.V1.RewrapData(ctx, v1.DecryptRequest{EncryptedData: e.EncryptedData, KeyId: e.KeyId})
	if err != nil {
		log.Fatal(err)
	}
	d, err := c.V1.DecryptData(ctx, v1.DecryptRequest{EncryptedData: e.EncryptedData, KeyId: e.KeyId})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(d.KeyVersion, d.Data)
	// Output: 2 attack at dawn
}
