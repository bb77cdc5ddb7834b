package egress

import (
	"errors"
	"net/netip"
	"slices"
)

// ErrAddress is the cause when the address is not public and the operator's list does not have it.
var ErrAddress = errors.New("the address is not public, and egress.allow does not have it")

// closed are the networks of IPv4 that are not public, or that a caller of this server must not reach
// (IANA's registry of special-purpose addresses, RFC 6890).
var closed = prefixes(
	"0.0.0.0/8",        // this network; Linux takes 0.0.0.0 for loopback
	"10.0.0.0/8",       // private
	"100.64.0.0/10",    // shared by the customers of a carrier (RFC 6598), and metadata of Alibaba
	"127.0.0.0/8",      // loopback
	"168.63.129.16/32", // the host of a virtual machine of Azure
	"169.254.0.0/16",   // link-local, and metadata of most clouds
	"172.16.0.0/12",    // private
	"192.0.0.0/24",     // IETF protocol assignments, and metadata of Oracle
	"192.0.2.0/24",     // documentation
	"192.88.99.0/24",   // relays of 6to4
	"192.168.0.0/16",   // private
	"198.18.0.0/15",    // benchmarks
	"198.51.100.0/24",  // documentation
	"203.0.113.0/24",   // documentation
	"224.0.0.0/4",      // multicast
	"240.0.0.0/4",      // reserved, and broadcast
)

// global is what IPv6 uses for public addresses. Outside of it are loopback, unspecified, link-local,
// unique local, multicast, IPv4-compatible, and NAT64, which reaches an IPv4 address of any kind.
var global = netip.MustParsePrefix("2000::/3")

// closed6 are the networks within [global] that are not public.
var closed6 = prefixes(
	"2001::/23",     // IETF protocol assignments; Teredo, which embeds an IPv4 address
	"2001:db8::/32", // documentation
	"2002::/16",     // 6to4, which embeds an IPv4 address
	"3fff::/20",     // documentation
)

func prefixes(all ...string) (list []netip.Prefix) {
	for _, text := range all {
		list = append(list, netip.MustParsePrefix(text))
	}
	return list
}

func has(networks []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(networks, func(p netip.Prefix) bool { return p.Contains(a) })
}

// isPublic reports whether everybody on the internet reaches an address.
func isPublic(a netip.Addr) bool {
	a = a.Unmap()
	if a.Is4() {
		return !has(closed, a)
	}
	return a.Zone() == "" && global.Contains(a) && !has(closed6, a)
}

// check returns [ErrAddress] for an address with its port that must not be called.
func check(address string, allow []netip.Prefix) error {
	at, err := netip.ParseAddrPort(address)
	if err != nil || !isPublic(at.Addr()) && !has(allow, at.Addr().Unmap()) {
		return ErrAddress
	}
	return nil
}
