package state

// SetPageBytes has loads read less in one View, and returns the function that ends it.
func SetPageBytes(n int) (end func()) {
	before := pageBytes
	pageBytes = n
	return func() { pageBytes = before }
}
