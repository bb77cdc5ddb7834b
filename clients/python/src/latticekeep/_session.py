"""The tokens of a user."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Callable, Optional, Tuple

from ._transport import Credential
from ._types_v2 import TokenAnswer
from .errors import ConnectionLostError, UnauthenticatedError

Tokens = Tuple[TokenAnswer, str]
"""An answer with the access token, and the refresh token."""


class Session:
    """Holds the tokens of a user, in memory only.

    A refresh token can be used once, and using it twice ends the session. So one exchange serves
    all calls that wait for it.
    """

    def __init__(self, exchange: Callable[[str], Tokens]) -> None:
        self._exchange = exchange
        self._lock = threading.Lock()
        self._number = 0  # changes with each login and logout, not with a renewal
        self._access = ""  # empty before a login and after a logout
        self._refresh = ""  # empty also after the session has ended
        self._renewal: Optional[Tuple[str, Future[Tokens]]] = None  # with the token it uses up

    def tokens(self) -> Tuple[Optional[Credential], str]:
        """Return the current tokens. The credential is None when nobody is signed in."""
        with self._lock:
            if not self._access:
                return None, ""
            return self._bearer(), self._refresh

    def begin(self, access: str, refresh: str) -> None:
        """Start a session and replace the previous one."""
        with self._lock:
            self._number += 1
            self._access, self._refresh = access, refresh

    def end(self, number: int) -> None:
        """Clear the session with this number, unless another has replaced it."""
        with self._lock:
            if self._number == number:
                self._number += 1
                self._access = self._refresh = ""

    def renew(self, refused: Credential) -> Credential:
        """Return a new credential of the same session for the rejected one.

        When the session has ended, or another has replaced it, this raises UnauthenticatedError:
        the call must not continue as another principal. The rejected token stays set, so that no
        other credential replaces it unasked.
        """
        with self._lock:
            if self._number != refused.session:
                raise UnauthenticatedError("the session of this call was replaced")
            if self._access != refused.access:  # another call was faster
                return self._bearer()
            renewal = self._join()
        answer = self._result(*renewal)
        return _bearer(answer["access_token"], refused.session)

    def force(self) -> TokenAnswer:
        """Exchange the refresh token although no token was rejected."""
        with self._lock:
            renewal = self._join()
        return self._result(*renewal)

    def _bearer(self) -> Credential:
        return _bearer(self._access, self._number)

    def _join(self) -> Tuple[str, Future[Tokens], bool]:
        """Return the exchange of the current refresh token, and whether the caller is to make it.
        The caller holds the lock."""
        if not self._refresh:
            raise UnauthenticatedError("there is no session to renew: sign in")
        if self._renewal is not None and self._renewal[0] == self._refresh:
            return (*self._renewal, False)
        self._renewal = self._refresh, Future()
        return (*self._renewal, True)

    def _result(self, refresh: str, future: Future[Tokens], is_mine: bool) -> TokenAnswer:
        if is_mine:
            try:
                tokens = self._exchange(refresh)
            except BaseException as error:
                self._finish(refresh, future, None, isinstance(error, UnauthenticatedError))
                # An interrupt is for this thread alone.
                is_shared = isinstance(error, Exception)
                future.set_exception(error if is_shared else ConnectionLostError("interrupted"))
                raise
            self._finish(refresh, future, tokens, False)
            future.set_result(tokens)
        return future.result()[0]

    def _finish(
        self, refresh: str, future: Future[Tokens], tokens: Optional[Tokens], has_ended: bool
    ) -> None:
        with self._lock:
            if self._refresh == refresh:  # nobody has signed in or out meanwhile
                if tokens is not None:
                    self._access, self._refresh = tokens[0]["access_token"], tokens[1]
                elif has_ended:
                    self._refresh = ""
            if self._renewal is not None and self._renewal[1] is future:
                self._renewal = None


def _bearer(access: str, session: int) -> Credential:
    return Credential("Authorization", "Bearer " + access, access, session)
