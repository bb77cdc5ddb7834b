"""Sending of calls: credentials, renewal of the session, and repetition."""

from __future__ import annotations

import email.utils
import json
import random
import re
import secrets
import time
import urllib.parse
from dataclasses import dataclass, field
from typing import (
    BinaryIO,
    Callable,
    Dict,
    Mapping,
    NamedTuple,
    Optional,
    Tuple,
    Union,
)

from ._connections import Address, Answer, Connections
from .errors import (
    ConnectionLostError,
    InvalidError,
    LatticekeepError,
    UnauthenticatedError,
    error_of,
)

# Seconds. If the server sets no pause, the first pause is half to all of _FIRST_PAUSE, and each
# later one is twice as long, up to _LAST_PAUSE. _LONGEST_PAUSE bounds what the server may set.
_FIRST_PAUSE = 0.2
_LAST_PAUSE = 10.0
_LONGEST_PAUSE = 120.0

_USER_AGENT = "latticekeep-python"


class Unset:
    """The type of UNSET, which stands for a field that is not sent. None is sent as null."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset()


def given(fields: Mapping[str, object], absent: object = None) -> Dict[str, object]:
    """Return the fields that have a value other than `absent`."""
    return {name: value for name, value in fields.items() if value is not absent}


class Record(Dict[str, object]):
    """A JSON object of an answer. Answers hold secrets and programs print them by mistake, so its
    repr has the names of the fields and no values."""

    def __repr__(self) -> str:
        return f"<{', '.join(self)}>"

    __str__ = __repr__


@dataclass(frozen=True, repr=False)
class Credential:
    """The header that authenticates the caller."""

    header: str
    value: str
    access: str = ""  # the access token, if it is one
    session: int = 0  # the number of its session


@dataclass(frozen=True, repr=False)
class Call:
    """One request, with the rules for sending it."""

    method: str
    path: str  # with the names of parameters in braces
    ids: Tuple[Union[str, int], ...] = ()  # values of these parameters
    query: Mapping[str, object] = field(default_factory=dict)
    headers: Mapping[str, object] = field(default_factory=dict)
    body: Optional[Mapping[str, object]] = None
    repeatable: bool = False  # repeating it has no further effect
    anonymous: bool = False  # it carries no credential
    probe: bool = False  # it asks about the present moment and is never repeated
    lasting: bool = False  # its answer may take as long as it wants
    silence: float = 0.0  # seconds without a byte that are usual, where the timeout may be less
    url: str = ""  # in place of base and path
    credential: Optional[Credential] = None  # carried without renewal
    refresh_token: str = ""

    @property
    def is_repeatable(self) -> bool:
        return self.repeatable or self.method == "GET" or "Idempotency-Key" in self.headers


class _Request(NamedTuple):
    address: Address
    target: str
    headers: Dict[str, str]
    body: Optional[bytes]

    def __repr__(self) -> str:  # the fields hold names and secrets
        return "<request>"


class Transport:
    """Sends calls to one deployment. A call keeps its principal to the end, even if a user signs
    in or out meanwhile."""

    def __init__(
        self,
        base: str,
        connections: Connections,
        *,
        credential: Callable[[], Optional[Credential]],
        renew: Optional[Callable[[Credential], Credential]],
        retries: int,
        timeout: float,
        sleep: Callable[[float], None],
    ) -> None:
        self._base = base
        self._connections = connections
        self._credential = credential
        self._renew = renew
        self._retries = retries
        self._timeout = timeout
        self._sleep = sleep

    def json(self, call: Call) -> object:
        """Send a call and return its answer in JSON."""
        return self.tagged(call)[0]

    def tagged(self, call: Call) -> Tuple[object, str]:
        """Send a call and return its answer in JSON and its entity tag."""
        answer = self.send(call)
        return decode(answer.read()), answer.headers.get("ETag", "")

    def raw(self, call: Call) -> bytes:
        """Send a call and return the bytes of its answer."""
        return self.send(call).read()

    def text(self, call: Call) -> str:
        """Send a call and return its answer as text."""
        return self.raw(call).decode("utf-8", "replace")

    def copy(self, call: Call, out: BinaryIO) -> int:
        """Send a call, write its answer to a file as it arrives, and return the number of bytes."""
        count = 0
        for chunk in self.send(call).chunks():
            out.write(chunk)
            count += len(chunk)
        return count

    def send(self, call: Call) -> Answer:
        """Send a call, with repetitions, and return the answer of a success."""
        request = self._request(call)
        who = call.credential
        if who is None and not call.anonymous:
            who = self._credential()
        attempt = 0
        while True:
            outcome = self._attempt(call, request, who)
            if isinstance(outcome, Answer) and outcome.status == 401:
                renewed = self._renewed(call, who, outcome)
                if renewed is not None:
                    who = renewed
                    outcome = self._attempt(call, request, who)
            if isinstance(outcome, Answer):
                if 200 <= outcome.status <= 299:
                    return outcome
                outcome = self._failure(outcome)
            pause = self._pause(call, attempt, outcome)
            if pause is None:
                raise outcome
            self._sleep(pause)
            attempt += 1

    def _renewed(
        self, call: Call, who: Optional[Credential], refusal: Answer
    ) -> Optional[Credential]:
        """Return a new credential of the same principal, or None when the refusal is final.

        Any other failure of the renewal ends the call: the refresh token may be used up, and using
        it again would end the session.
        """
        if call.credential is not None or who is None or not who.access or self._renew is None:
            return None
        try:
            renewed = self._renew(who)
        except UnauthenticatedError:
            return None
        except BaseException:
            refusal.close()
            raise
        refusal.close()
        return renewed

    def _attempt(
        self, call: Call, request: _Request, who: Optional[Credential]
    ) -> Union[Answer, LatticekeepError]:
        """Send a call once, and return its answer or how the connection failed."""
        headers = dict(request.headers)
        if who is not None:
            headers[who.header] = who.value
        for value in headers.values():
            if not re.fullmatch(r"[\t\x20-\x7e]*", value):
                raise InvalidError("making the request: a header is not printable ASCII")
        timeout = None if call.lasting else max(self._timeout, call.silence)
        try:
            return self._connections.send(
                request.address, call.method, request.target, headers, request.body, timeout
            )
        except ConnectionLostError as lost:
            return lost

    def _request(self, call: Call) -> _Request:
        headers = {"User-Agent": _USER_AGENT, "Accept-Encoding": "identity"}
        for name, value in call.headers.items():
            headers[name] = str(value)
        if call.refresh_token:
            headers["Cookie"] = "refreshToken=" + call.refresh_token
        body = None
        if call.body is not None:
            body = json.dumps(call.body, allow_nan=False).encode()
            headers["Content-Type"] = "application/json"
        url = urllib.parse.urlsplit(call.url or self._base)
        target = url.path
        query = url.query
        if not call.url:
            target += _escaped_path(call)
            query = urllib.parse.urlencode({k: _parameter(v) for k, v in call.query.items()})
        target = target or "/"
        if query:
            target += "?" + query
        if not re.fullmatch(r"[\x21-\x7e]+", target):
            raise InvalidError("making the request: the URL is not printable ASCII")
        return _Request(address_of(url), target, headers, body)

    def _failure(self, answer: Answer) -> LatticekeepError:
        retry_after = _retry_after(answer.headers.get("Retry-After", ""))
        request_id = answer.headers.get("X-Request-ID", "")
        try:
            body = answer.read()
        except ConnectionLostError:
            body = b""  # the status says enough
        return error_of(answer.status, body, request_id, retry_after)

    def _pause(self, call: Call, attempt: int, failure: LatticekeepError) -> Optional[float]:
        """Return how long to wait before the call is sent again, or None if it must not be.

        The server answers 429 before it does anything. After a 503 or a broken connection the
        outcome is unknown.
        """
        if call.probe or attempt >= self._retries:
            return None
        if isinstance(failure, ConnectionLostError):
            again = call.is_repeatable and not failure.timed_out
        elif failure.status == 503:
            again = call.is_repeatable
        else:
            again = failure.status == 429
        if not again:
            return None
        if failure.retry_after:
            if failure.retry_after > _LONGEST_PAUSE:
                return None
            # Many clients must not return at the same instant.
            return failure.retry_after + random.uniform(0, _FIRST_PAUSE)
        full = min(_LAST_PAUSE, _FIRST_PAUSE * 2.0 ** min(attempt, 10))
        return full / 2 + random.uniform(0, full / 2)


def decode(body: bytes) -> object:
    try:
        return json.loads(body, object_hook=Record)
    except ValueError:
        raise LatticekeepError("reading the answer: it is not JSON") from None


def new_idempotency_key() -> str:
    return secrets.token_urlsafe(24)


def address_of(url: urllib.parse.SplitResult) -> Address:
    usual = 443 if url.scheme == "https" else 80
    return Address(url.scheme, url.hostname or "", url.port or usual)


def _escaped_path(call: Call) -> str:
    """Return the path with its ids. The dots of a dot segment (RFC 3986 §5.2.4) are escaped, so
    that the call cannot reach another endpoint."""
    ids = iter(call.ids)
    segments = call.path.split("/")
    for i, segment in enumerate(segments):
        if not segment.startswith("{"):
            continue
        value = str(next(ids))
        if not value:
            raise InvalidError("making the request: the id or name is empty")
        if value in (".", ".."):
            segments[i] = value.replace(".", "%2E")
            continue
        try:
            segments[i] = urllib.parse.quote(value, safe="")
        except UnicodeEncodeError:
            raise InvalidError("making the request: the id or name is not text") from None
    return "/".join(segments)


def _parameter(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _retry_after(value: str) -> Optional[float]:
    """Read the Retry-After header (RFC 9110 §10.2.3)."""
    if re.fullmatch(r"[0-9]{1,9}", value):
        return float(value)
    at = email.utils.parsedate_tz(value)
    return max(0.0, email.utils.mktime_tz(at) - time.time()) if at is not None else None
