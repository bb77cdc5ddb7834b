package s3test_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/latticekeep/latticekeep/test/s3test"
)

func TestTheServerAnswersStrangersWithARefusalAndEndsWithStop(t *testing.T) {
	s := s3test.ForTest(t)
	rawURL, err := s.Bucket("private")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(rawURL, "s3://private?") || !strings.HasPrefix(s.Endpoint, "http://127.0.0.1:") {
		t.Errorf("bucket %s at %s", rawURL, s.Endpoint)
	}
	resp, err := http.Get(s.Endpoint + "/private")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusForbidden {
		t.Errorf("without credentials: status %d", resp.StatusCode)
	}
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	if resp, err := http.Get(s.Endpoint + "/private"); err == nil {
		resp.Body.Close()
		t.Error("it answers after Stop")
	}
}
