"""The client, and the operations that need more than their contract says."""

from __future__ import annotations

import re
import ssl
import time
import urllib.parse
from types import TracebackType
from typing import BinaryIO, Callable, Iterator, List, Mapping, Optional, Type, TypeVar, cast

from ._connections import Answer, Connections, default_context, is_loopback
from ._operations_v1 import OperationsV1
from ._operations_v2 import OperationsV2
from ._session import Session, Tokens
from ._transport import Call, Credential, Transport, decode, given
from ._types_v2 import AuditEntry, EmptyAnswer, TokenAnswer
from .errors import InvalidError, LatticekeepError, UnauthenticatedError

_LONGEST_LINE = 1 << 20  # bytes
_COMMENT_EVERY = 15.0  # seconds; a tail without news has a comment line so often


class Client:
    """Talks to one deployment as one principal. Threads may share it.

    Args:
        base_url: Such as https://vault.example.org.
        api_key: The key that calls carry while nobody is signed in.
        retries: How many times a call may be repeated; 0 sends each call once.
        timeout: Seconds to wait for the connection and for each part of the answer. Backups and
            exports have no limit.
        ssl_context: In place of one that trusts the authorities of the system and requires TLS 1.2.
        plain_http: Allow plain HTTP to a host that is not loopback. Credentials and secrets then
            cross the network unencrypted, unless a layer below HTTP encrypts them.
        sleep: In place of time.sleep, between repetitions.
    """

    v1: OperationsV1
    """The operations of version 1, which takes an API key only."""
    v2: V2
    """The operations of version 2."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: Optional[str] = None,
        retries: int = 4,
        timeout: float = 65.0,
        ssl_context: Optional[ssl.SSLContext] = None,
        plain_http: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if retries < 0:
            raise ValueError("the number of retries is negative")
        if api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", api_key):
            raise ValueError("the API key is empty or has a character that no key has")
        self._base = _checked_base(base_url, plain_http)
        self._connections = Connections(ssl_context or default_context())

        def transport(
            credential: Callable[[], Optional[Credential]],
            renew: Optional[Callable[[Credential], Credential]] = None,
        ) -> Transport:
            return Transport(
                self._base,
                self._connections,
                credential=credential,
                renew=renew,
                retries=retries,
                timeout=timeout,
                sleep=sleep,
            )

        bearer = Credential("Authorization", f"Bearer {api_key}") if api_key else None
        header = Credential("X-API-Key", api_key) if api_key else None
        session = Session(lambda refresh: self.v2._exchange(refresh))
        self.v1 = OperationsV1(transport(lambda: bearer))
        # Never both: the server treats a request with two credentials as one without any.
        second = transport(lambda: session.tokens()[0] or header, session.renew)
        self.v2 = V2(second, session, plain_http)

    def __repr__(self) -> str:
        return f"<latticekeep.Client of {self._base}>"

    def close(self) -> None:
        """Close the idle connections. The client can still be used, and opens new ones."""
        self._connections.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()


class V2(OperationsV2):
    """The operations of version 2. After `login` they act as the user, until `logout`."""

    def __init__(self, transport: Transport, session: Session, plain_http: bool) -> None:
        super().__init__(transport)
        self._session = session
        self._plain_http = plain_http

    def login(self, *, email: str, password: str) -> TokenAnswer:
        """Begin a session. From then on the methods of version 2 act as the user."""
        body = {"email": email, "password": password}
        call = Call("POST", "/api/v2/auth/login", body=body, anonymous=True)
        answer, refresh = self._tokens(call)
        self._session.begin(answer["access_token"], refresh)
        return answer

    def refresh_session(self) -> TokenAnswer:
        """Exchange the refresh token for new tokens now.

        This is seldom necessary, because a rejected call does it by itself. UnauthenticatedError:
        there is no session, or it has ended.
        """
        return self._session.force()

    def logout(self) -> EmptyAnswer:
        """End the session, or do nothing when it has already ended.

        Afterwards the methods of version 2 carry the API key again, if there is one.
        """
        access, refresh = self._session.tokens()
        answer: EmptyAnswer = {"success": True}
        if access is None:
            return answer
        # The server accepts either token, so an expired access token needs no renewal first.
        call = Call("POST", "/api/v2/auth/logout", credential=access, refresh_token=refresh)
        try:
            answer = cast(EmptyAnswer, self._transport.json(call))
        except UnauthenticatedError:
            pass
        self._session.end(access.session)
        return answer

    def download_report(self, url: str, out: BinaryIO) -> int:
        """Download from a URL of `get_compliance_report` to a file, and return the number of bytes.

        The report is at the deployment or in the bucket where it keeps reports. The URL itself
        authorises the call, so no credential is sent. ForbiddenError: it has expired or was
        changed.
        """
        try:
            _checked_url(url, self._plain_http)
        except ValueError as error:
            raise InvalidError(f"making the request: {error}") from None
        return self._transport.copy(Call("GET", "", url=url, anonymous=True), out)

    def tail_audit_log(
        self,
        *,
        after: Optional[int] = None,
        wait: Optional[int] = None,
        last_event_id: Optional[int] = None,
    ) -> AuditTail:
        """Follow the tenant's own entries as they are written, oldest first.

        The tail begins after the entry `last_event_id`, or else after `after`, or else with the
        entry that it leaves itself. It ends by itself after `wait` seconds (300), or when the
        server stops. To continue, open another one with its `last_event_id`.

        Scope: `audit:read`.
        """
        call = Call(
            "GET",
            "/api/v2/audit/tail",
            query=given({"after": after, "wait": wait}),
            headers=given({"Last-Event-ID": last_event_id}),
            silence=3 * _COMMENT_EVERY,
        )
        return AuditTail(self._transport.send(call), last_event_id)

    def _exchange(self, refresh: str) -> Tokens:
        call = Call("POST", "/api/v2/auth/refresh", anonymous=True, refresh_token=refresh)
        return self._tokens(call)

    def _tokens(self, call: Call) -> Tokens:
        """Send a call whose answer contains both tokens."""
        answer = self._transport.send(call)
        tokens = cast(TokenAnswer, decode(answer.read()))
        for line in answer.headers.get_all("Set-Cookie", []):
            name, _, value = line.partition(";")[0].partition("=")
            if name.strip() == "refreshToken":
                return tokens, value.strip()
        return tokens, ""


class AuditTail(Iterator[AuditEntry]):
    """An open tail of the audit log. Only one thread may use it."""

    last_event_id: Optional[int]
    """The sequence of the entry that was read last, to continue after it."""

    def __init__(self, answer: Answer, last_event_id: Optional[int]) -> None:
        self.last_event_id = last_event_id
        self._chunks = answer.chunks()
        self._answer = answer
        self._lines: Iterator[bytes] = self._split()

    def __next__(self) -> AuditEntry:
        """Wait for the next entry. The iteration ends when the server ends the tail."""
        for line in self._lines:
            # The other lines are comments, empty ones, and the id, which the entry contains too.
            if line.startswith(b"data:"):
                entry = cast(AuditEntry, decode(line[len(b"data:") :]))
                self.last_event_id = entry["sequence"]
                return entry
        raise StopIteration

    def close(self) -> None:
        """End the tail."""
        self._answer.close()

    def __enter__(self) -> AuditTail:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        self.close()

    def _split(self) -> Iterator[bytes]:
        rest: List[bytes] = []
        for chunk in self._chunks:
            first, *others = chunk.split(b"\n")
            rest.append(first)
            if sum(map(len, rest)) > _LONGEST_LINE:
                raise LatticekeepError("reading the answer: a line of the tail is too long")
            for line in others:
                yield b"".join(rest)
                rest = [line]


Page = TypeVar("Page", bound=Mapping[str, object])


def paginate(method: Callable[..., Page], **parameters: object) -> Iterator[Page]:
    """Yield the pages of an operation that has a `cursor`, to the last one.

    A page may be empty and still have a next one.
    """
    while True:
        page = method(**parameters)
        yield page
        cursor = page.get("next_cursor")
        if not cursor:
            return
        parameters["cursor"] = cursor


def _checked_base(base_url: str, plain_http: bool) -> str:
    url = _checked_url(base_url, plain_http)
    if url.query or url.fragment:
        raise ValueError("the base URL has a query or a fragment: leave it out")
    return base_url.rstrip("/")


def _checked_url(text: str, plain_http: bool) -> urllib.parse.SplitResult:
    """Raise ValueError for a URL that no call may be sent to. The message does not repeat it."""
    try:
        url = urllib.parse.urlsplit(text)
        is_usable = url.scheme in ("https", "http") and bool(url.hostname) and url.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ValueError("the URL is not one like https://vault.example.org")
    if url.username is not None or url.password is not None:
        raise ValueError("the URL has a user: leave it out")
    if url.scheme == "http" and not plain_http and not is_loopback(url.hostname or ""):
        raise ValueError("plain HTTP shows every secret on the way: use https, or plain_http=True")
    return url
