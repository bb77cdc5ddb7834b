package doctor

// HasMAC is hasMAC for tests.
var HasMAC = hasMAC

// Decides reports whether the table says what a family decides.
func Decides(family string) bool { return families[family].decides != "" }
