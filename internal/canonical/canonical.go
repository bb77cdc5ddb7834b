// Package canonical encodes values as JSON in one form alone: compact, with the fields in the order of
// the type, with <, > and & as they are, and one line feed at the end. Two programs that decode the
// same bytes therefore see the same value.
package canonical

import (
	"bytes"
	"encoding/json"
	"errors"
)

// Encode returns the one encoding of v.
func Encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

// Decode is the inverse of [Encode]. Comparing with the one encoding refuses unknown and repeated
// fields, lenient base64 and everything after the value.
func Decode(b []byte, v any) error {
	if err := json.Unmarshal(b, v); err != nil {
		return err
	}
	again, err := Encode(v)
	if err != nil {
		return err
	}
	if !bytes.Equal(again, b) {
		return errors.New("it is not as this program writes it")
	}
	return nil
}
