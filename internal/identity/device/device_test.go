package device

import (
	"strings"
	"testing"
)

func TestDevicesAreCalledByTheirFamilies(t *testing.T) {
	for header, want := range map[string]string{
		"Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0":                                                                     "Firefox on Linux",
		"Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/141.0.0.0 Safari/537.36":                            "Chrome on Windows",
		"Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/141.0.0.0 Safari/537.36 Edg/141.0.0.0":              "Edge on Windows",
		"Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15 (KHTML, like Gecko) Version/26.0 Safari/605.1.15":                      "Safari on macOS",
		"Mozilla/5.0 (iPhone; CPU iPhone OS 18_7 like Mac OS X) AppleWebKit/605.1.15 (KHTML, like Gecko) Version/26.0 Mobile/15E148 Safari/604.1":    "Safari on iOS",
		"Mozilla/5.0 (iPad; CPU OS 18_7 like Mac OS X) AppleWebKit/605.1.15 (KHTML, like Gecko) CriOS/141.0 Mobile/15E148 Safari/604.1":              "Chrome on iPadOS",
		"Mozilla/5.0 (Linux; Android 15; SM-S921B) AppleWebKit/537.36 (KHTML, like Gecko) SamsungBrowser/28.0 Chrome/130.0.0.0 Mobile Safari/537.36": "Samsung Internet on Android",
		"Mozilla/5.0 (X11; CrOS x86_64 14541.0.0) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/141.0.0.0 Safari/537.36 OPR/120.0":                   "Opera on ChromeOS",
		"Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) HeadlessChrome/141.0.0.0 Safari/537.36":                              "Chrome on Linux",
		"Mozilla/5.0 (compatible; Unknown; Linux)": "Browser on Linux",
		"curl/8.16.0":                            "curl",
		"Go-http-client/1.1":                     "Go-http-client",
		"python-requests/2.32 (Linux)":           "python-requests on Linux",
		"latticekeep/1.2.3":                      "latticekeep",
		"(Windows NT 10.0)":                      "Windows",
		"":                                       "",
		"<script>alert(1)</script>":              "",
		"\x00\x1b[31m\u202eevil/1":               "",
		"a\r\nSet-Cookie: x=y":                   "a",
		strings.Repeat("x", 5000) + " Firefox/1": strings.Repeat("x", 32),
		strings.Repeat(" ", 600) + "Firefox/1":   "", // beyond what is looked at
	} {
		if got := Of(header); got != want {
			t.Errorf("%.80q is %q, want %q", header, got, want)
		}
	}
}

func FuzzOf(f *testing.F) {
	f.Add("Mozilla/5.0 (X11; Linux x86_64) Firefox/140.0")
	f.Fuzz(func(t *testing.T, header string) {
		if got := Of(header); len(got) > 60 || strings.ContainsFunc(got, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("%q is %q", header, got)
		}
	})
}
