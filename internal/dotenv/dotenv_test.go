package dotenv

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for text, want := range map[string]string{
		"":                               "",
		"# only\n\n  \t\n":               "",
		"A=1\nB=2":                       "1 A=1|2 B=2",
		"\ufeffA=1\r\nB=2\r\n":           "1 A=1|2 B=2",
		"export A=1\n  export  B = 2 \n": "1 A=1|2 B=2",
		"A=":                             "1 A=",
		"A= # nothing":                   "1 A=",
		"A=a b # comment\nB=a#b":         "1 A=a b|2 B=a#b",
		"A='a # b' # comment":            "1 A=a # b",
		`A='a\n$B'`:                      `1 A=a\n$B`,
		`A="a\n\"\$B\\ \d"`:              "1 A=a\n\"$B\\ \\d",
		"A=$B${C}":                       "1 A=$B${C}",
		"A=\"a\nb\n\"\nB='\n'\nC=3":      "1 A=a\nb\n|4 B=\n|6 C=3",
		"A=a=b==":                        "1 A=a=b==",
		"A=it's":                         "1 A=it's",
		"DB.URL-2=x":                     "1 DB.URL-2=x",
		"A=1\nB\nC=3":                    "1 A=1|3 C=3|line 2: it has no =",
		"1A=s3cret":                      "line 1: what stands before = is no name",
		"A=1\nA=s3cret":                  "1 A=1|line 2: A stands in line 1 already",
		"A='s3cret\nB=2":                 "2 B=2|line 1: the quote that its value begins with does not end",
		"A='s3' cret\nB=2":               "2 B=2|line 1: something follows the quote",
		"A=\"x\ny\" z\nB=2":              "3 B=2|line 1: something follows the quote",
		"A=s3cret\xff\nB=2":              "2 B=2|line 1: its value is not UTF-8",
	} {
		all, err := Parse([]byte(text))
		var got []string
		for _, v := range all {
			got = append(got, fmt.Sprintf("%d %s=%s", v.Line, v.Name, v.Value))
		}
		if err != nil {
			got = append(got, strings.Split(err.Error(), "\n")...)
			if strings.Contains(err.Error(), "s3cret") {
				t.Errorf("%q: the error shows a value: %v", text, err)
			}
		}
		parts := strings.Split(want, "|")
		if want == "" {
			parts = nil
		}
		if !slices.EqualFunc(got, parts, strings.HasPrefix) {
			t.Errorf("%q: %q, want %q", text, got, parts)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("A=1\nexport B='2\n3' # x\nC=\"\\n\"\nD"))
	f.Fuzz(func(t *testing.T, text []byte) {
		all, _ := Parse(text)
		for _, v := range all {
			if !name.MatchString(v.Name) || v.Line < 1 || v.Line > strings.Count(string(text), "\n")+1 {
				t.Errorf("%q: %+v", text, v)
			}
		}
	})
}
