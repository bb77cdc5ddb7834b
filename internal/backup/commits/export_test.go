package commits

// SetSize sets about how large a segment with several records is.
func (s *Shipper) SetSize(bytes int) { s.size = bytes }

// The format, for its golden vector and its fuzz target.
type Statement = statement

var (
	Seal           = seal
	ParseStatement = parseStatement
)

// Unseal returns the records of a segment.
var Unseal = statement.unseal
