// Command coredns is the name server of `make e2e`'s node: CoreDNS with the plugins that Services need, and none of the clouds'.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

func main() {
	// The order in which a query passes through them, which is otherwise made by CoreDNS's own generator.
	dnsserver.Directives = []string{"bind", "errors", "kubernetes"}
	coremain.Run()
}
