// The theme of the documentation's site, for Hugo's modules: it has no Go code.
module github.com/latticekeep/latticekeep/hack/docs/site

go 1.26

require github.com/imfing/hextra v0.11.1
