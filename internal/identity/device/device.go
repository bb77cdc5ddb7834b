// Package device describes in a few words what program a request came from, for the list of a user's sessions. The
// words are for people, who know their own devices; nothing is decided by them, since anybody sends any header.
package device

import (
	"regexp"
	"strings"
)

// maxHeader is how much of a header is looked at.
const maxHeader = 512

// programs and systems are pairs of what a header has and what that is called. The first that is found counts:
// browsers name the browsers that they are compatible with after themselves.
var (
	programs = [][2]string{
		{"Edg", "Edge"}, {"OPR/", "Opera"}, {"SamsungBrowser/", "Samsung Internet"}, {"Firefox/", "Firefox"}, {"FxiOS/", "Firefox"},
		{"CriOS/", "Chrome"}, {"Chromium/", "Chromium"}, {"Chrome/", "Chrome"}, {"Safari/", "Safari"}, {"Mozilla/", "Browser"},
	}
	systems = [][2]string{
		{"iPhone", "iOS"}, {"iPad", "iPadOS"}, {"Android", "Android"}, {"CrOS", "ChromeOS"}, {"Windows", "Windows"}, {"Mac OS X", "macOS"}, {"Linux", "Linux"},
	}
	product = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9._-]{0,31}`) // what RFC 9110 §10.1.5 begins with, without its version
)

// Of returns the family of the program and the operating system that a User-Agent header names, such as "Firefox on
// Linux", or nothing for a header that names neither. It has at most 60 bytes, all of them printable ASCII.
func Of(userAgent string) string {
	userAgent = userAgent[:min(len(userAgent), maxHeader)]
	program := find(programs, userAgent)
	if program == "" {
		program = product.FindString(userAgent)
	}
	system := find(systems, userAgent)
	if program == "" || system == "" {
		return program + system
	}
	return program + " on " + system
}

func find(in [][2]string, text string) string {
	for _, pair := range in {
		if strings.Contains(text, pair[0]) {
			return pair[1]
		}
	}
	return ""
}
