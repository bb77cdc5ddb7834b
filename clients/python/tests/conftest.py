"""The real server, and a stub for what it cannot be made to do."""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional

import pytest

from latticekeep import Client


@pytest.fixture
def client() -> Iterator[Client]:
    with Client(os.environ["LATTICEKEEP_URL"], api_key=os.environ["LATTICEKEEP_API_KEY"]) as made:
        yield made


@pytest.fixture
def person() -> Iterator[Client]:
    """A client of a user who is signed in."""
    with Client(os.environ["LATTICEKEEP_URL"]) as made:
        made.v2.login(
            email=os.environ["LATTICEKEEP_EMAIL"], password=os.environ["LATTICEKEEP_PASSWORD"]
        )
        yield made


class Sent(NamedTuple):
    """A request that the stub got."""

    method: str
    target: str
    headers: Dict[str, str]
    body: bytes


class Reply(NamedTuple):
    """What the stub answers. Without a status it breaks the connection."""

    status: Optional[int]
    body: Dict[str, Any] = {}
    headers: Dict[str, str] = {}
    cut: int = 0  # bytes at the end that are announced and not sent
    text: str = ""  # in place of the body
    closes: bool = False  # the connection afterwards, without saying so


class Stub:
    """A server that answers as a test says, on loopback."""

    def __init__(self, answer: Callable[[Sent], Reply]) -> None:
        self.sent: List[Sent] = []
        self.connections = 0
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                stub.connections += 1
                super().setup()

            def answer(self) -> None:
                size = int(self.headers.get("Content-Length", "0"))
                sent = Sent(self.command, self.path, dict(self.headers), self.rfile.read(size))
                stub.sent.append(sent)
                reply = answer(sent)
                if reply.status is None:
                    self.close_connection = True
                    return
                body = (reply.text or json.dumps(reply.body)).encode()
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body) + reply.cut))
                self.end_headers()
                self.wfile.write(body)
                if reply.cut or reply.closes:
                    self.close_connection = True

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_CONNECT = answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        serve = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        serve.start()

    def client(self, **options: Any) -> Client:
        """Return a client that notes its pauses in `pauses` and does not wait."""
        self.pauses: List[float] = []
        options.setdefault("api_key", "lk_live_test")
        return Client(self.url, sleep=self.pauses.append, **options)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def stub() -> Iterator[Callable[..., Stub]]:
    """A function that starts a stub. Replies are given in order, the last again and again; or a
    function makes them."""
    started: List[Stub] = []

    def start(*replies: Reply, by: Optional[Callable[[Sent], Reply]] = None) -> Stub:
        rest = list(replies)
        made = Stub(by or (lambda _: rest.pop(0) if len(rest) > 1 else rest[0]))
        started.append(made)
        return made

    yield start
    for made in started:
        made.close()


def refusal(status: int, **headers: str) -> Reply:
    error = {"code": status, "message": "the reason", "request_id": "req_1"}
    return Reply(
        status,
        {"success": False, "error": error},
        {name.replace("_", "-"): value for name, value in headers.items()},
    )
