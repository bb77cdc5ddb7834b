package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"
)

// answerTimeout is longer than any of the server's own time limits here.
const answerTimeout = 20 * time.Second

// A connection sends one request at a time over HTTP/1.1. It does as little work as possible
// because it runs on the server's cores. Its share is measured all the same.
type connection struct {
	address string
	conn    net.Conn
	in      *bufio.Reader
	body    []byte // body of the last answer
}

func dial(address string) (*connection, error) {
	c := &connection{address: address}
	if err := c.redial(); err != nil {
		return nil, err
	}
	return c, nil
}

func (c *connection) redial() (err error) {
	c.close()
	if c.conn, err = net.DialTimeout("tcp", c.address, answerTimeout); err != nil {
		return err
	}
	if c.in == nil {
		c.in = bufio.NewReaderSize(c.conn, 16<<10)
	} else {
		c.in.Reset(c.conn)
	}
	return nil
}

func (c *connection) close() {
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

// do sends a complete request and returns the status and the body. The body is valid until the next
// call.
func (c *connection) do(request []byte) (status int, body []byte, err error) {
	if c.conn == nil {
		if err := c.redial(); err != nil {
			return 0, nil, err
		}
	}
	status, body, keep, err := c.exchange(request)
	if err != nil || !keep {
		c.close()
	}
	return status, body, err
}

var (
	contentLength = []byte("Content-Length: ")
	closing       = []byte("Connection: close")
)

func (c *connection) exchange(request []byte) (status int, body []byte, keep bool, err error) {
	if err := c.conn.SetDeadline(time.Now().Add(answerTimeout)); err != nil {
		return 0, nil, false, err
	}
	if _, err := c.conn.Write(request); err != nil {
		return 0, nil, false, fmt.Errorf("sending a request: %w", err)
	}
	line, err := c.in.ReadSlice('\n')
	if err != nil {
		return 0, nil, false, fmt.Errorf("reading an answer: %w", err)
	}
	if len(line) < len("HTTP/1.1 200") {
		return 0, nil, false, errors.New("reading an answer: no status line")
	}
	if status, err = strconv.Atoi(string(line[9:12])); err != nil {
		return 0, nil, false, fmt.Errorf("reading an answer: %w", err)
	}
	length := -1
	keep = true
	for {
		if line, err = c.in.ReadSlice('\n'); err != nil {
			return 0, nil, false, fmt.Errorf("reading an answer's header: %w", err)
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			break
		}
		if rest, ok := bytes.CutPrefix(line, contentLength); ok {
			if length, err = strconv.Atoi(string(rest)); err != nil {
				return 0, nil, false, fmt.Errorf("reading an answer's length: %w", err)
			}
		}
		keep = keep && !bytes.Equal(line, closing)
	}
	if status == http.StatusNoContent {
		return status, nil, keep, nil
	}
	if length < 0 {
		return 0, nil, false, errors.New("reading an answer: it has no length")
	}
	if cap(c.body) < length {
		c.body = make([]byte, length+length/2)
	}
	c.body = c.body[:length]
	if _, err := io.ReadFull(c.in, c.body); err != nil {
		return 0, nil, false, fmt.Errorf("reading an answer's body: %w", err)
	}
	return status, c.body, keep, nil
}

// request returns a complete request. key may be empty, and body nil.
func request(method, path, key string, body []byte) []byte {
	return requestWith(method, path, "X-API-Key", key, body)
}

// requestWith is request with a key in another header.
func requestWith(method, path, header, key string, body []byte) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%s %s HTTP/1.1\r\nHost: bench\r\n", method, path)
	if key != "" {
		fmt.Fprintf(&b, "%s: %s\r\n", header, key)
	}
	if body != nil {
		fmt.Fprintf(&b, "Content-Type: application/json\r\nContent-Length: %d\r\n", len(body))
	}
	b.WriteString("\r\n")
	b.Write(body)
	return b.Bytes()
}
