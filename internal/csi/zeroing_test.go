package csi

import (
	"bytes"
	"testing"

	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/proto"
	"sigs.k8s.io/secrets-store-csi-driver/provider/v1alpha1"
)

// The answer that is sent has the values, and the one in memory has them no longer.
func TestAnAnswerKeepsNoValueOnceItIsEncoded(t *testing.T) {
	answer := &v1alpha1.MountResponse{Files: []*v1alpha1.File{{Path: "a", Contents: []byte("s3cret")}, {Path: "b", Contents: []byte("another")}}}
	encoded, err := zeroing{encoding.GetCodecV2(proto.Name)}.Marshal(answer)
	if err != nil {
		t.Fatal(err)
	}
	sent := encoded.Materialize()
	for _, value := range []string{"s3cret", "another"} {
		if !bytes.Contains(sent, []byte(value)) {
			t.Errorf("%s is not sent", value)
		}
	}
	for _, f := range answer.GetFiles() {
		if !bytes.Equal(f.GetContents(), make([]byte, len(f.GetContents()))) {
			t.Errorf("%s is still there", f.GetContents())
		}
	}
}
