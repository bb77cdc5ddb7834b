package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestGeneratedFilesAreThoseOfTheContracts(t *testing.T) {
	files, err := generate()
	if err != nil {
		t.Fatal(err)
	}
	if len(files) != 4 {
		t.Errorf("%d files, want 4", len(files))
	}
	for name, want := range files {
		got, err := os.ReadFile(filepath.Join("../../clients/python/src/latticekeep", name))
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != want {
			t.Errorf("%s is out of date: run `make generate`", name)
		}
	}
}

func TestNamesAreThoseOfPython(t *testing.T) {
	for name, want := range map[string]string{
		"sealCredential": "seal_credential", "createAPIKey": "create_api_key", "listKMSKeys": "list_kms_keys", "listAPIKeys": "list_api_keys",
		"If-None-Match": "if_none_match", "key_id": "key_id", "q": "q",
	} {
		if got := snake(name); got != want {
			t.Errorf("%s became %s, want %s", name, got, want)
		}
	}
}
