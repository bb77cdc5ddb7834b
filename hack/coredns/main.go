// Command coredns is the name server of the node of `make e2e`: CoreDNS with the plugins that
// Services need, and without those for cloud providers.
package main

import (
	"github.com/coredns/coredns/core/dnsserver"
	"github.com/coredns/coredns/coremain"
	_ "github.com/coredns/coredns/plugin/bind"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/kubernetes"
)

func main() {
	// The order in which a query passes through the plugins. CoreDNS's own generator usually makes
	// this list.
	dnsserver.Directives = []string{"bind", "errors", "kubernetes"}
	coremain.Run()
}
