"""Connections to servers: TLS, plain HTTP to loopback, proxies, and reuse."""

from __future__ import annotations

import base64
import http.client
import ipaddress
import os
import selectors
import socket
import ssl
import threading
import urllib.parse
import urllib.request
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional

from .errors import ConnectionLostError, InvalidError

_CHUNK = 64 << 10


class Address(NamedTuple):
    """Where a server listens."""

    scheme: str
    host: str
    port: int


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def default_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class Connections:
    """Idle connections, for reuse by any thread."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._idle: Dict[Address, List[http.client.HTTPConnection]] = {}
        self._process = os.getpid()

    def send(
        self,
        address: Address,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: Optional[bytes],
        timeout: Optional[float],
    ) -> Answer:
        """Send one request and return its answer. It follows no redirect."""
        connection = self._take(address)
        try:
            connection.timeout = timeout
            if connection.sock is not None:
                connection.sock.settimeout(timeout)
            connection.request(method, target, body, dict(headers))
            return Answer(self, address, connection, connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise _lost("calling the server", error) from None
        except BaseException:
            connection.close()
            raise

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def put_back(self, address: Address, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._idle.setdefault(address, []).append(connection)

    def _take(self, address: Address) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                if self._process != os.getpid():
                    # A forked process must not go on with the TLS state of its parent. The
                    # sockets are closed without a goodbye, which would be the parent's.
                    for connections in self._idle.values():
                        for shared in connections:
                            if shared.sock is not None:
                                os.close(shared.sock.detach())
                    self._idle, self._process = {}, os.getpid()
                idle = self._idle.get(address)
                connection = idle.pop() if idle else None
            if connection is None:
                return self._open(address)
            if not _is_dropped(connection):
                return connection
            connection.close()

    def _open(self, address: Address) -> http.client.HTTPConnection:
        proxy = _proxy_for(address)
        at = proxy or address
        connection: http.client.HTTPConnection
        if address.scheme == "https":
            connection = http.client.HTTPSConnection(at.host, at.port, context=self._context)
        else:
            connection = http.client.HTTPConnection(at.host, at.port)
        if proxy is not None:
            connection.set_tunnel(address.host, address.port, _proxy_headers(address))
        return connection


class Answer:
    """An answer, whose body is read as it arrives."""

    def __init__(
        self,
        connections: Connections,
        address: Address,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
    ) -> None:
        self.status = response.status
        self.headers = response.headers
        self._connections = connections
        self._address = address
        self._connection = connection
        self._response = response

    def chunks(self) -> Iterator[bytes]:
        """Yield the body. An end that is not that of the answer is a ConnectionLostError."""
        # http.client reports a short body only where it is chunked, so the bytes are counted here.
        left = self._response.length
        is_whole = False
        try:
            while left != 0:
                chunk = self._response.read1(_CHUNK if left is None else min(_CHUNK, left))
                if not chunk:
                    break
                if left is not None:
                    left -= len(chunk)
                yield chunk
            if left:
                raise http.client.IncompleteRead(b"")
            is_whole = True
        except (OSError, http.client.HTTPException) as error:
            raise _lost("reading the answer", error) from None
        finally:
            will_close = self._response.will_close
            self._response.close()
            if is_whole and not will_close and self._connection.sock is not None:
                self._connections.put_back(self._address, self._connection)
            else:
                self._connection.close()

    def read(self) -> bytes:
        return b"".join(self.chunks())

    def close(self) -> None:
        self._response.close()
        self._connection.close()


def _lost(doing: str, error: Exception) -> ConnectionLostError:
    # Errors of http.client repeat what was received, so only their kind is told.
    reason = str(error) if isinstance(error, OSError) and str(error) else type(error).__name__
    timed_out = isinstance(error, (socket.timeout, TimeoutError))
    return ConnectionLostError(f"{doing}: {reason}", timed_out=timed_out)


def _is_dropped(connection: http.client.HTTPConnection) -> bool:
    """Report whether the server has closed an idle connection: then it is readable."""
    if connection.sock is None:
        return True
    with selectors.DefaultSelector() as selector:
        selector.register(connection.sock, selectors.EVENT_READ)
        return bool(selector.select(timeout=0))


def _proxy_url(address: Address) -> Optional[urllib.parse.SplitResult]:
    if is_loopback(address.host) or urllib.request.proxy_bypass(address.host):
        return None
    url = urllib.request.getproxies().get(address.scheme)
    if not url:
        return None
    proxy = urllib.parse.urlsplit(url if "//" in url else "//" + url)
    if proxy.scheme not in ("", "http"):
        raise InvalidError("the proxy of the environment is not one like http://proxy:3128")
    return proxy


def _proxy_for(address: Address) -> Optional[Address]:
    url = _proxy_url(address)
    return Address("http", url.hostname, url.port or 80) if url and url.hostname else None


def _proxy_headers(address: Address) -> Dict[str, str]:
    url = _proxy_url(address)
    if url is None or url.username is None:
        return {}
    user = urllib.parse.unquote(url.username) + ":" + urllib.parse.unquote(url.password or "")
    return {"Proxy-Authorization": "Basic " + base64.b64encode(user.encode()).decode()}
