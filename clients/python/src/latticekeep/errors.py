"""The errors that calls raise."""

from __future__ import annotations

import http
import json
from typing import Any, Dict, Optional, Type


class LatticekeepError(Exception):
    """A call failed. Its subclasses stand for the failures that need the same reaction.

    A message never contains a path, since names of credentials are in it, nor anything that was
    sent.
    """

    status: int
    """HTTP status; 0 when there was no answer or nothing was sent."""
    code: int
    """Status in the body; differs from `status` only when a proxy answered."""
    message: str
    """What went wrong and what to do."""
    details: str
    """More about it, in version 1 only."""
    request_id: str
    """Quote it when asking for help; the audit entry contains it."""
    retry_after: Optional[float]
    """Seconds that the server asked to wait."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        code: int = 0,
        details: str = "",
        request_id: str = "",
        retry_after: Optional[float] = None,
    ) -> None:
        line = f"latticekeep answered {status}: {message}" if status else message
        if details:
            line += f": {details}"
        if request_id:
            line += f" (request {request_id})"
        super().__init__(line)
        self.message = message
        self.status = status
        self.code = code
        self.details = details
        self.request_id = request_id
        self.retry_after = retry_after


class InvalidError(LatticekeepError):
    """400, 413, 415, 422, or refused before sending: change the request."""


class UnauthenticatedError(LatticekeepError):
    """401: use another key, or sign in again."""


class ForbiddenError(LatticekeepError):
    """403: needs another scope; in the vault also: there is no such credential."""


class NotFoundError(LatticekeepError):
    """404."""


class ConflictError(LatticekeepError):
    """409: the current state does not allow it."""


class NotModifiedError(LatticekeepError):
    """304: what `if_none_match` names is still there."""


class PreconditionFailedError(LatticekeepError):
    """412: it changed meanwhile. Read again, and repeat the change on what is there now."""


class RateLimitedError(LatticekeepError):
    """429: nothing was done. Retry after `retry_after` seconds."""


class ServerError(LatticekeepError):
    """500: a defect of the server."""


class UnavailableError(LatticekeepError):
    """503: retry later; the outcome is unknown."""


class ConnectionLostError(LatticekeepError):
    """The server could not be reached, or its answer ended early. The outcome is unknown."""

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


_KINDS: Dict[int, Type[LatticekeepError]] = {
    304: NotModifiedError,
    400: InvalidError,
    401: UnauthenticatedError,
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    412: PreconditionFailedError,
    413: InvalidError,
    415: InvalidError,
    422: InvalidError,
    429: RateLimitedError,
    500: ServerError,
    503: UnavailableError,
}


def error_of(
    status: int, body: bytes, request_id: str, retry_after: Optional[float]
) -> LatticekeepError:
    """Return the error of an answer.

    The status alone describes a body that is not our envelope, such as a proxy's page.
    """
    envelope: Dict[str, Any] = {}
    try:
        parsed = json.loads(body)
        if isinstance(parsed, dict) and isinstance(parsed.get("error"), dict):
            envelope = parsed["error"]
    except ValueError:
        pass
    try:
        phrase = http.HTTPStatus(status).phrase.lower()
    except ValueError:
        phrase = "unknown status"
    code = envelope.get("code")
    return _KINDS.get(status, LatticekeepError)(
        str(envelope.get("message") or phrase),
        status=status,
        code=code if isinstance(code, int) else 0,
        details=str(envelope.get("details") or ""),
        request_id=str(envelope.get("request_id") or request_id),
        retry_after=retry_after,
    )
