"""The Python client of Latticekeep, a quantum-safe credential vault.

`Client.v2` has a method for every operation of version 2 of the REST interface, and `Client.v1` for
every operation of version 1. Answers are dictionaries, typed in `types_v2` and `types_v1`.

With an API key every call carries the key. After `Client.v2.login` the calls of version 2 carry the
user's access token instead, until `Client.v2.logout`. When the server rejects the token as expired,
one exchange of the refresh token serves all threads, and each call is sent once more. Tokens stay in
memory. Operations that need no credential carry none.

Every answer other than a success raises a `LatticekeepError`. A call that got status 429 is repeated
after the time that the server asks for, because the server has done nothing. After a 503 or a broken
connection the outcome is unknown. Then only calls that are safe to repeat are repeated: those that
read, encrypt, sign or set a complete state, and `seal_credential`, which carries an idempotency key.
"""

from __future__ import annotations

from . import _types_v1 as types_v1
from . import _types_v2 as types_v2
from ._client import V2, AuditTail, Client, paginate
from ._operations_v1 import OperationsV1 as V1
from ._transport import UNSET, Unset
from .errors import (
    ConflictError,
    ConnectionLostError,
    ForbiddenError,
    InvalidError,
    LatticekeepError,
    NotFoundError,
    NotModifiedError,
    PreconditionFailedError,
    RateLimitedError,
    ServerError,
    UnauthenticatedError,
    UnavailableError,
)

__all__ = [
    "UNSET",
    "V1",
    "V2",
    "AuditTail",
    "Client",
    "ConflictError",
    "ConnectionLostError",
    "ForbiddenError",
    "InvalidError",
    "LatticekeepError",
    "NotFoundError",
    "NotModifiedError",
    "PreconditionFailedError",
    "RateLimitedError",
    "ServerError",
    "UnauthenticatedError",
    "UnavailableError",
    "Unset",
    "paginate",
    "types_v1",
    "types_v2",
]
