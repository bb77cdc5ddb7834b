package asset

import "testing"

func TestAcceptEncoding(t *testing.T) {
	for header, want := range map[string]bool{
		"": false, "gzip": true, "GZIP": true, "deflate, gzip": true, "gzip;q=0": false, "gzip; q=0.001": true, "gzip;q=x": false,
		"br": false, "xgzip": false, "*": false,
	} {
		if got := acceptsGzip(header); got != want {
			t.Errorf("%q: %v", header, got)
		}
	}
}
