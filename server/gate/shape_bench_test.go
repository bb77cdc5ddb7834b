package gate

import (
	"encoding/base64"
	"strings"
	"testing"
)

// BenchmarkBody checks bodies as clients send them, once with the shape of the operation first, as the
// gate does, and once with the schema alone.
func BenchmarkBody(b *testing.B) {
	all := shaped(b)
	envelope := base64.StdEncoding.EncodeToString(make([]byte, 1088))
	for _, c := range []struct{ name, id, body string }{
		{"encrypt", "v2 encryptData", `{"data":"` + strings.Repeat("a", 256) + `"}`},
		{"decrypt", "v2 decryptData", `{"ciphertext_kem":"` + envelope + `","nonce":"AAAAAAAAAAAAAAAA",` +
			`"ciphertext_data":"` + base64.StdEncoding.EncodeToString(make([]byte, 272)) + `","key_version":1}`},
		{"seal", "v2 sealCredential", `{"name":"orders-db","credential_type":"database","values":` +
			`{"host":"db.example.org","port":"5432","username":"orders","password":"` + strings.Repeat("p", 32) + `"},"ttl_days":90}`},
		{"batch of 100", "v2 encryptBatch", `{"items":[` + strings.Repeat(`{"data":"`+strings.Repeat("a", 256)+`"},`, 99) +
			`{"data":"a"}]}`},
	} {
		op, body := all[c.id], []byte(c.body)
		if op == nil || !op.shape.holds(body) {
			b.Fatalf("the shape of %s does not accept the body", c.id)
		}
		b.Run(c.name+"/shape", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if !op.shape.holds(body) {
					b.Fatal("refused")
				}
			}
		})
		b.Run(c.name+"/schema", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := checkJSON(body); err != nil {
					b.Fatal(err)
				}
				if err := op.checkBody(body); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
