package audit

import (
	"github.com/go-json-experiment/json"
)

func jsonUnmarshal(b []byte, to any) error { return json.Unmarshal(b, to) }
