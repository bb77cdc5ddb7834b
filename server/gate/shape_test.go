package gate

import (
	"strings"
	"testing"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/latticekeep/latticekeep/api/openapi"
)

// shaped are the operations of both contracts whose bodies have a shape, by their ids.
func shaped(t testing.TB) map[string]*operation {
	t.Helper()
	all := make(map[string]*operation)
	for version, contract := range map[string]string{"v1 ": openapi.V1(), "v2 ": openapi.V2()} {
		doc, err := openapi3.NewLoader().LoadFromData([]byte(contract))
		if err != nil {
			t.Fatal(err)
		}
		for _, item := range doc.Paths.Map() {
			for _, written := range item.Operations() {
				if written.RequestBody == nil {
					continue
				}
				schema := written.RequestBody.Value.Content.Get("application/json").Schema
				op := &operation{body: schema.Value, shape: shapeOf(schema), required: written.RequestBody.Value.Required}
				if op.shape != nil {
					all[version+written.OperationID] = op
				}
			}
		}
	}
	return all
}

func TestTheBodiesOfBusyOperationsHaveAShape(t *testing.T) {
	all := shaped(t)
	for id, body := range map[string]string{
		"v2 encryptData":    `{"data":"secret \u00e4","algorithm":"ML-KEM-768"}`,
		"v2 decryptData":    ` { "ciphertext_kem" : "AA==" , "nonce":"AA==","ciphertext_data":"AA==","success":true,"key_version":1 } `,
		"v2 signData":       `{"data":"ä"}`,
		"v2 verifyData":     `{"data":"a","pqc_signature":"AA==","hmac_signature":"AA=="}`,
		"v2 sealCredential": `{"name":"n","credential_type":"database","values":{"a":"b"},"ttl_days":90}`,
		"v2 encryptBatch":   `{"items":[{"data":"a"},{"data":"b"}]}`,
		"v1 encryptData":    `{"data":"a","algorithm":"ML-KEM-768"}`,
	} {
		if op := all[id]; op == nil || !op.shape.holds([]byte(body)) {
			t.Errorf("%s does not hold for %s", id, body)
		}
	}
}

// bodies are seeds: each is right for something, or wrong in a way of its own.
var bodies = []string{
	`{"data":"a"}`, `{"data":""}`, `{"data":1}`, `{"data":null}`, `{}`, `[]`, `null`, `{"data":"a","data":"b"}`, `{"data":"a","d\u0061ta":"b"}`,
	`{"data":"a"}x`, `{"data":"a"`, `{"data":"\ud800"}`, "{\"data\":\"\xff\"}", `{"data":"a","other":[[[1]]]}`, `{"data":"a","other":1e999}`,
	`{"data":"a","pqc_signature":"AA==","hmac_signature":"AA==","success":true}`, `{"data":"a","pqc_signature":"AA==","hmac_signature":"AA==","success":null}`,
	`{"data":"a","algorithm":"ML-KEM-768"}`, `{"data":"a","algorithm":"ML-KEM-512"}`, `{"data":"a","algorithm":"ML\u002dKEM-768"}`,
	`{"items":[]}`, `{"items":[{"data":"a"}]}`, `{"items":[{"data":"a"},{}]}`, `{"items":[` + strings.Repeat(`{"data":"a"},`, 100) + `{"data":"a"}]}`,
	`{"name":"n","credential_type":"database","values":{"a":"b"}}`, `{"name":"n","credential_type":"-","values":{"a":"b"}}`,
	`{"name":"n","credential_type":"database","values":{}}`, `{"name":"n","credential_type":"database","values":{"a":1}}`,
	`{"name":"` + strings.Repeat("ä", 255) + `","credential_type":"x","values":{"a":"b"}}`, `{"name":"` + strings.Repeat("a", 256) + `","credential_type":"x","values":{"a":"b"}}`,
	`{"values":{"a":"b"},"ttl_days":90}`, `{"values":{"a":"b"},"ttl_days":0}`, `{"email":"a@example.org","password":"correct horse"}`, `{"token":"abc"}`,
}

func FuzzAShapeHoldsForNothingThatTheContractRefuses(f *testing.F) {
	all := shaped(f)
	for _, body := range bodies {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for id, op := range all {
			if !op.shape.holds(body) {
				continue
			}
			if err := checkJSON(body); err != nil {
				t.Errorf("%s: %q: %v", id, body, err)
			}
			if err := op.checkBody(body); err != nil {
				t.Errorf("%s: %q: %v", id, body, err)
			}
		}
	})
}
