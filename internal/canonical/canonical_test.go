package canonical

import "testing"

type sample struct {
	Name  string `json:"name"`
	Bytes []byte `json:"bytes"`
	Count uint64 `json:"count,omitempty"`
}

const encoded = `{"name":"<a>&b","bytes":"AQ=="}` + "\n"

func TestAValueHasOneEncoding(t *testing.T) {
	b, err := Encode(sample{Name: "<a>&b", Bytes: []byte{1}})
	if err != nil || string(b) != encoded {
		t.Errorf("%s, %v; want %s", b, err, encoded)
	}
	var s sample
	if err := Decode(b, &s); err != nil || s.Name != "<a>&b" || string(s.Bytes) != "\x01" {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestOtherEncodingsAreRefused(t *testing.T) {
	for what, text := range map[string]string{
		"no line feed":      `{"name":"a","bytes":"AQ=="}`,
		"a second value":    `{"name":"a","bytes":"AQ=="}` + "\n{}\n",
		"an unknown field":  `{"name":"a","bytes":"AQ==","x":1}` + "\n",
		"a repeated field":  `{"name":"a","name":"a","bytes":"AQ=="}` + "\n",
		"another order":     `{"bytes":"AQ==","name":"a"}` + "\n",
		"another case":      `{"Name":"a","bytes":"AQ=="}` + "\n",
		"white space":       `{"name": "a","bytes":"AQ=="}` + "\n",
		"an escape":         `{"name":"\u0061","bytes":"AQ=="}` + "\n",
		"lenient base64":    `{"name":"a","bytes":"AR=="}` + "\n",
		"a field of nought": `{"name":"a","bytes":"AQ==","count":0}` + "\n",
		"a field less":      `{"name":"a"}` + "\n",
		"no JSON":           "name\n",
	} {
		if err := Decode([]byte(text), new(sample)); err == nil {
			t.Errorf("%s is taken: %s", what, text)
		}
	}
}
