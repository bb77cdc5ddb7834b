package app

import (
	"net"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/latticekeep/latticekeep/test/machine"
)

func TestOneAddressDoesNotHoldAllConnections(t *testing.T) {
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := prometheus.NewCounter(prometheus.CounterOpts{Name: "closed"})
	l := newSourceListener(inner, 2, closed)
	accept := func() net.Conn {
		t.Helper()
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	address := l.Addr().String()
	machine.DialFrom(t, "127.0.0.1", address)
	machine.DialFrom(t, "127.0.0.1", address)
	first := accept()
	accept()
	third, other := machine.DialFrom(t, "127.0.0.1", address), machine.DialFrom(t, "127.0.0.2", address)
	if c := accept(); c.RemoteAddr().String() != other.LocalAddr().String() {
		t.Errorf("%s is let in", c.RemoteAddr())
	}
	if n, err := third.Read(make([]byte, 1)); n != 0 || err == nil {
		t.Error("a connection too many is kept open")
	}
	m := new(dto.Metric)
	if err := closed.Write(m); err != nil || m.GetCounter().GetValue() != 1 {
		t.Error(m, err)
	}
	first.Close()
	first.Close() // closing twice counts once
	fourth := machine.DialFrom(t, "127.0.0.1", address)
	if c := accept(); c.RemoteAddr().String() != fourth.LocalAddr().String() {
		t.Errorf("%s is let in", c.RemoteAddr())
	}
	machine.DialFrom(t, "127.0.0.1", address)
	inner.Close()
	if _, err := l.Accept(); err == nil || l.open["127.0.0.1"] != 2 {
		t.Error(err, l.open)
	}
}
