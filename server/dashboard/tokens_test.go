package dashboard_test

import (
	"math"
	"regexp"
	"strconv"
	"testing"
)

// Each pair of colours that is used together can be told apart by everybody, in light and in dark (WCAG 2.2, 1.4.3 and 1.4.11).
func TestColoursHaveEnoughContrast(t *testing.T) {
	colours := map[string][2]float64{} // luminance in light and in dark
	for _, m := range regexp.MustCompile(`--([a-z-]+): light-dark\(#([0-9a-f]{6}), #([0-9a-f]{6})\)`).FindAllStringSubmatch(read(t, "static/tokens.css"), -1) {
		colours[m[1]] = [2]float64{luminance(t, m[2]), luminance(t, m[3])}
	}
	grounds := []string{"ground", "surface", "raised"}
	pairs := map[string][]string{
		"text": append(grounds, "accent-soft", "good-soft", "warn-soft", "bad-soft"), "quiet": append(grounds, "accent-soft", "bad-soft"), "accent": append(grounds, "accent-soft"),
		"on-accent": {"accent"}, "good": {"surface", "good-soft"}, "warn": {"surface", "warn-soft"}, "bad": {"surface", "bad-soft"},
	}
	contrast := func(a, b string, scheme int) float64 {
		one, other := colours[a][scheme], colours[b][scheme]
		return (max(one, other) + 0.05) / (min(one, other) + 0.05)
	}
	for scheme, name := range []string{"light", "dark"} {
		for text, all := range pairs {
			for _, ground := range all {
				if c := contrast(text, ground, scheme); c < 4.5 {
					t.Errorf("%s: %s on %s has a contrast of %.2f, want 4.5", name, text, ground, c)
				}
			}
		}
		for _, ground := range []string{"surface", "ground"} {
			if c := contrast("control", ground, scheme); c < 3 {
				t.Errorf("%s: borders of controls on %s have a contrast of %.2f, want 3", name, ground, c)
			}
		}
	}
}

// luminance is the relative luminance of a colour in sRGB.
func luminance(t *testing.T, hex string) (l float64) {
	t.Helper()
	for i, weight := range []float64{0.2126, 0.7152, 0.0722} {
		n, err := strconv.ParseUint(hex[2*i:2*i+2], 16, 8)
		if err != nil {
			t.Fatal(err)
		}
		c := float64(n) / 255
		if c <= 0.04045 {
			c /= 12.92
		} else {
			c = math.Pow((c+0.055)/1.055, 2.4)
		}
		l += weight * c
	}
	return l
}
