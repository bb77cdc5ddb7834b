"""Behaviour that the real server cannot be made to need: lost answers, limits, slow networks."""

from __future__ import annotations

import io
import os
import select
import socket
import threading
import traceback
from typing import Any, Callable, Dict, List

import pytest
from conftest import Reply, Sent, Stub, refusal

import latticekeep
from latticekeep import Client

Start = Callable[..., Stub]

OK = Reply(200, {"success": True})
LOST = Reply(None)


def seal(client: Client) -> object:
    return client.v2.seal_credential(name="n", credential_type="t", values={"k": "v"})


def create(client: Client) -> object:
    return client.v2.create_key(name="n")


def test_429_waits_as_long_as_the_server_says(stub: Start) -> None:
    server = stub(refusal(429, Retry_After="7"), refusal(429, Retry_After="120"), OK)
    client = server.client()
    create(client)  # not repeatable otherwise: nothing was done
    assert 7 <= server.pauses[0] <= 7.2 and 120 <= server.pauses[1] <= 120.2
    assert len({s.body for s in server.sent}) == 1 and len(server.sent) == 3


@pytest.mark.parametrize("now, least", [(9, 0.1), (-9, 9)])  # seconds after the date
def test_429_with_a_date_waits_until_then(
    stub: Start, monkeypatch: pytest.MonkeyPatch, now: float, least: float
) -> None:
    date = "Wed, 21 Oct 2015 07:28:00 GMT"
    server = stub(refusal(429, Retry_After=date), OK)
    monkeypatch.setattr("time.time", lambda: 1445412480.0 + now)
    create(server.client())
    assert least <= server.pauses[0] <= least + 0.2


@pytest.mark.parametrize("value", ["121", "999999999", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_429_with_a_long_wait_is_an_error(stub: Start, value: str) -> None:
    server = stub(refusal(429, Retry_After=value))
    with pytest.raises(latticekeep.RateLimitedError) as failure:
        create(server.client())
    assert failure.value.retry_after is not None and failure.value.retry_after > 120
    assert server.pauses == [] and len(server.sent) == 1


@pytest.mark.parametrize("failure", [refusal(503), LOST])
def test_only_repeatable_calls_are_repeated(stub: Start, failure: Reply) -> None:
    kind = latticekeep.UnavailableError if failure.status else latticekeep.ConnectionLostError
    repeated: List[Callable[[Client], object]] = [
        lambda c: c.v2.list_credentials(),
        lambda c: c.v2.encrypt_data(data="d"),
        lambda c: c.v2.put_history_rule(path="p", versions_kept=1),
        lambda c: c.v1.encrypt_data(data="d", algorithm="ML-KEM-768"),
        seal,
    ]
    for call in repeated:
        server = stub(failure, failure, OK)
        call(server.client())
        assert len(server.sent) == 3
        assert 0.1 <= server.pauses[0] <= 0.2 <= server.pauses[1] <= 0.4
    once: List[Callable[[Client], object]] = [
        create,
        lambda c: c.v2.replace_credential("c", values={"k": "v"}),
        lambda c: c.v2.delete_credential("c"),
        lambda c: c.v2.get_health(),
        lambda c: c.v2.get_readiness(),
        lambda c: c.v2.get_diagnosis(),
        lambda c: c.v2.get_metrics(),
        lambda c: c.v2.login(email="e", password="p"),
    ]
    for call in once:
        server = stub(failure)
        with pytest.raises(kind):
            call(server.client())
        assert len(server.sent) == 1 and server.pauses == []


def test_probes_are_not_repeated_after_429(stub: Start) -> None:
    server = stub(refusal(429, Retry_After="1"))
    with pytest.raises(latticekeep.RateLimitedError):
        server.client().v2.get_health()
    assert len(server.sent) == 1


def test_repetition_ends(stub: Start) -> None:
    server = stub(refusal(503))
    with pytest.raises(latticekeep.UnavailableError):
        server.client().v2.list_keys()
    assert len(server.sent) == 5
    assert server.pauses == sorted(server.pauses)
    with pytest.raises(latticekeep.UnavailableError):
        server.client(retries=0).v2.list_keys()
    assert len(server.sent) == 6


def test_a_seal_keeps_its_idempotency_key(stub: Start) -> None:
    server = stub(LOST, OK)
    client = server.client()
    seal(client)
    seal(client)
    first, again, second = (s.headers["Idempotency-Key"] for s in server.sent)
    assert first == again != second and len(first) >= 32
    client.v2.seal_credential(name="n", credential_type="t", values={}, idempotency_key="mine")
    assert server.sent[-1].headers["Idempotency-Key"] == "mine"


def test_each_version_has_its_header(stub: Start) -> None:
    server = stub(OK)
    client = server.client()
    client.v1.list_keys()
    assert server.sent[-1].headers["Authorization"] == "Bearer lk_live_test"
    assert "X-API-Key" not in server.sent[-1].headers
    client.v2.list_keys()
    assert server.sent[-1].headers["X-API-Key"] == "lk_live_test"
    assert "Authorization" not in server.sent[-1].headers
    client.v2.get_sealing_key()
    client.v2.request_password_reset(email="e")
    for sent in server.sent[-2:]:  # what needs no credential gets none
        assert not {"X-API-Key", "Authorization", "Cookie"} & set(sent.headers)


def tokens(n: int) -> Reply:
    cookie = f"refreshToken=refresh-{n}; Path=/api/v2/auth; HttpOnly; SameSite=Strict"
    body = {"success": True, "access_token": f"access-{n}"}
    return Reply(200, body, {"Set-Cookie": cookie})


class Door:
    """Answers sign-ins and renewals with numbered tokens, and knows which one is valid."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.issued = 0
        self.refreshed: List[str] = []
        self.valid = ""
        self.on_refresh: Callable[[], Reply] = self.issue

    def issue(self) -> Reply:
        with self.lock:
            self.issued += 1
            self.valid = f"Bearer access-{self.issued}"
            return tokens(self.issued)

    def __call__(self, sent: Sent) -> Reply:
        if sent.target.endswith("/auth/login"):
            return self.issue()
        if sent.target.endswith("/auth/refresh"):
            self.refreshed.append(sent.headers["Cookie"])
            return self.on_refresh()
        return OK if sent.headers.get("Authorization") == self.valid else refusal(401)


def test_one_refresh_serves_all_calls_in_flight(stub: Start) -> None:
    door, together = Door(), threading.Barrier(8)
    refusing = True

    def answer(sent: Sent) -> Reply:
        reply = door(sent)
        if refusing and reply.status == 401:
            together.wait()  # until every call has been refused
        return reply

    server = stub(by=answer)
    client = server.client()
    client.v2.login(email="e", password="p")
    door.valid = "none"
    results: List[object] = []
    threads = [
        threading.Thread(target=lambda: results.append(client.v2.list_keys())) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8 and door.refreshed == ["refreshToken=refresh-1"]
    assert not any("X-API-Key" in s.headers for s in server.sent)


def test_a_call_that_is_refused_late_takes_the_new_token(stub: Start) -> None:
    door, has_come, may_go = Door(), threading.Event(), threading.Event()

    def answer(sent: Sent) -> Reply:
        if sent.target.endswith("/me") and not may_go.is_set():
            has_come.set()
            may_go.wait()
            return refusal(401)
        return door(sent)

    client = stub(by=answer).client()
    client.v2.login(email="e", password="p")
    late = threading.Thread(target=client.v2.get_account)
    late.start()
    has_come.wait()
    door.valid = "none"
    client.v2.list_keys()
    may_go.set()
    late.join()
    assert door.refreshed == ["refreshToken=refresh-1"]


def test_a_401_that_the_new_token_does_not_cure_is_final(stub: Start) -> None:
    door = Door()
    server = stub(by=lambda s: refusal(401) if s.target.endswith("/keys") else door(s))
    client = server.client()
    client.v2.login(email="e", password="p")
    with pytest.raises(latticekeep.UnauthenticatedError):
        client.v2.list_keys()
    assert [s.target.rsplit("/", 1)[1] for s in server.sent] == ["login", "keys", "refresh", "keys"]


def test_a_401_with_an_api_key_is_final(stub: Start) -> None:
    server = stub(refusal(401))
    with pytest.raises(latticekeep.UnauthenticatedError):
        server.client().v2.list_keys()
    assert len(server.sent) == 1


def test_a_refused_refresh_ends_the_session(stub: Start) -> None:
    door = Door()
    server = stub(by=door)
    client = server.client()
    client.v2.login(email="e", password="p")
    door.valid = "none"
    door.on_refresh = lambda: refusal(401)
    for _ in range(2):
        with pytest.raises(latticekeep.UnauthenticatedError):
            client.v2.list_keys()
    assert len(door.refreshed) == 1
    # The key does not replace the user unasked.
    assert not any("X-API-Key" in s.headers for s in server.sent)


@pytest.mark.parametrize("reply", [LOST, refusal(503)])
def test_a_refresh_without_an_answer_is_not_repeated(stub: Start, reply: Reply) -> None:
    door = Door()
    server = stub(by=door)
    client = server.client()
    client.v2.login(email="e", password="p")
    door.valid = "none"
    door.on_refresh = lambda: reply
    with pytest.raises((latticekeep.ConnectionLostError, latticekeep.UnavailableError)):
        client.v2.list_keys()
    assert len(door.refreshed) == 1 and server.pauses == []


def test_a_call_never_changes_its_principal(stub: Start) -> None:
    door = Door()

    def answer(sent: Sent) -> Reply:
        if sent.target.endswith("/keys"):
            client.v2.login(email="other", password="p")
            return refusal(401)
        return door(sent)

    server = stub(by=answer)
    client = server.client()
    client.v2.login(email="e", password="p")
    with pytest.raises(latticekeep.UnauthenticatedError):
        client.v2.list_keys()
    assert [s.target.rsplit("/", 1)[1] for s in server.sent] == ["login", "keys", "login"]


def test_a_repeated_call_keeps_its_principal(stub: Start) -> None:
    door = Door()
    answers = [refusal(429), OK]
    server = stub(by=lambda s: answers.pop(0) if s.target.endswith("/keys") else door(s))

    def sign_in(_: float) -> None:
        client.v2.login(email="e", password="p")

    client = Client(server.url, api_key="lk_live_test", sleep=sign_in)
    create(client)
    assert [s.headers.get("X-API-Key") for s in server.sent] == ["lk_live_test", None, "lk_live_test"]
    assert "Authorization" not in server.sent[-1].headers


def test_redirects_are_not_followed(stub: Start) -> None:
    elsewhere = stub(OK)
    server = stub(Reply(307, {}, {"Location": elsewhere.url + "/"}))
    with pytest.raises(latticekeep.LatticekeepError) as failure:
        server.client().v2.list_keys()
    assert failure.value.status == 307 and elsewhere.sent == []


def test_a_timeout_is_not_repeated() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        pauses: List[float] = []
        client = Client(url, api_key="k", timeout=0.05, sleep=pauses.append)
        with pytest.raises(latticekeep.ConnectionLostError, match="timed out"):
            client.v2.list_keys()
        assert pauses == []


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    pauses: List[float] = []
    with pytest.raises(latticekeep.ConnectionLostError):
        Client(f"http://127.0.0.1:{port}", sleep=pauses.append).v2.get_vault_summary()
    assert len(pauses) == 4


def test_connections_are_used_again_until_the_server_closes_them(stub: Start) -> None:
    server = stub(OK)
    client = server.client()
    for _ in range(3):
        create(client)
    assert server.connections == 1
    server = stub(Reply(200, {}, {"Connection": "close"}), Reply(200, closes=True), OK)
    client = server.client()
    create(client)
    create(client)
    ((idle,),) = client._connections._idle.values()
    select.select([idle.sock], [], [])  # until the server has closed it
    create(client)  # it must not be repeated, so it would fail on that connection
    assert server.connections == 3


def test_an_answer_that_ends_early_is_no_answer(stub: Start) -> None:
    out = io.BytesIO()
    server = stub(Reply(200, {"success": True}, cut=10))
    client = server.client(retries=0)
    calls: List[Callable[[], object]] = [
        lambda: client.v2.list_keys(),
        lambda: client.v2.export_audit_log(out),
        lambda: list(client.v2.tail_audit_log()),
    ]
    for call in calls:
        with pytest.raises(latticekeep.ConnectionLostError):
            call()


def test_an_empty_page_is_not_the_last(stub: Start) -> None:
    def page(sent: Sent) -> Reply:
        pages: Dict[str, Dict[str, Any]] = {
            "/api/v2/keys?limit=1": {"keys": [{"name": "1"}], "next_cursor": "a/b"},
            "/api/v2/keys?limit=1&cursor=a%2Fb": {"keys": [], "next_cursor": "c"},
            "/api/v2/keys?limit=1&cursor=c": {"keys": [{"name": "2"}]},
        }
        return Reply(200, pages[sent.target])

    client = stub(by=page).client()
    assert [k["name"] for k in client.v2.iterate_keys(limit=1)] == ["1", "2"]
    pages = latticekeep.paginate(client.v2.list_keys, limit=1)
    assert [len(p["keys"]) for p in pages] == [1, 0, 1]


@pytest.mark.parametrize("name", ["", "\ud800"])
def test_an_id_that_is_none_is_not_sent(stub: Start, name: str) -> None:
    server = stub(OK)
    client = server.client()
    calls: List[Callable[[], object]] = [
        lambda: client.v2.unseal_credential_by_name(name),
        lambda: client.v2.delete_credential(name),
        lambda: client.v2.add_group_member("g", name),
    ]
    for call in calls:
        with pytest.raises(latticekeep.InvalidError) as failure:
            call()
        assert failure.value.status == 0
    assert server.sent == []


def test_ids_are_escaped(stub: Start) -> None:
    server = stub(OK)
    client = server.client()
    for name in (".", "..", "a/../b", "a?b#c%", "é"):
        client.v2.unseal_credential_by_name(name)
    assert [s.target.rsplit("/by-name/", 1)[1] for s in server.sent] == [
        "%2E",
        "%2E%2E",
        "a%2F..%2Fb",
        "a%3Fb%23c%25",
        "%C3%A9",
    ]


def test_a_header_cannot_be_split(stub: Start) -> None:
    server = stub(OK)
    client = server.client()
    for value in ("s3cr3t\r\nX: y", "s3cr3t\x00", "s3cr3t\u20ac"):
        with pytest.raises(latticekeep.InvalidError) as failure:
            client.v2.delete_credential("c", if_match=value)
        assert "s3cr3t" not in "".join(traceback.format_exception(None, failure.value, None))
        with pytest.raises(ValueError, match="API key") as refused:
            Client(server.url, api_key=value)
        assert "s3cr3t" not in str(refused.value)
    assert server.sent == []


def test_secrets_are_in_no_repr(stub: Start) -> None:
    values = {"success": True, "values": {"password": "s3cr3t"}, "access_token": "s3cr3t"}
    server = stub(Reply(200, values, {"Set-Cookie": "refreshToken=s3cr3t"}))
    client = server.client(api_key="s3cr3t")
    client.v2.login(email="e", password="s3cr3t")
    answer = client.v2.unseal_credential("c")
    assert answer["values"] == {"password": "s3cr3t"}
    inside = vars(client.v2)
    seen = [client, vars(client), inside, vars(inside["_transport"]), answer, dict(answer)["values"]]
    assert "s3cr3t" not in repr(seen) + str(answer) + f"{answer}"


def test_the_page_of_a_proxy_is_told_by_its_status(stub: Start) -> None:
    with pytest.raises(latticekeep.LatticekeepError, match="502: bad gateway"):
        stub(Reply(502, {"page": "of a proxy"})).client().v2.list_keys()


def test_an_answer_that_is_no_json_is_an_error(stub: Start) -> None:
    server = stub(Reply(200, text="<html>s3cr3t"))
    with pytest.raises(latticekeep.LatticekeepError, match="not JSON") as failure:
        server.client().v2.list_keys()
    assert "s3cr3t" not in "".join(traceback.format_exception(None, failure.value, None))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "vault.example.org",
        "ftp://vault.example.org",
        "https://",
        "https://u:p@vault.example.org",
        "https://vault.example.org?q",
        "https://vault.example.org#f",
        "https://vault.example.org:x",
        "https://[x",
        "http://vault.example.org",
        "http://10.0.0.1",
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(ValueError) as failure:
        Client(url)
    assert "u:p" not in str(failure.value)


def test_plain_http_is_for_loopback_or_asked_for() -> None:
    for url in ("http://localhost:1", "http://127.0.0.1:1", "http://[::1]:1"):
        Client(url)
    Client("http://vault.example.org", plain_http=True)
    with pytest.raises(ValueError):
        Client("https://vault.example.org", retries=-1)


def test_a_proxy_is_asked_for_a_tunnel(stub: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = stub(refusal(502))
    monkeypatch.setenv("https_proxy", proxy.url.replace("//", "//user:word@"))
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(latticekeep.ConnectionLostError, match="502"):
        Client("https://vault.example.org", api_key="lk_live_test", retries=0).v2.list_keys()
    assert proxy.sent[0].method == "CONNECT" and proxy.sent[0].target == "vault.example.org:443"
    assert proxy.sent[0].headers["Proxy-Authorization"] == "Basic dXNlcjp3b3Jk"
    assert "X-API-Key" not in proxy.sent[0].headers


@pytest.mark.parametrize("scheme", ["https", "socks5"])
def test_a_proxy_that_is_not_plain_http_gets_nothing(
    stub: Start, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    proxy = stub(refusal(502))
    monkeypatch.setenv("https_proxy", proxy.url.replace("http://", scheme + "://user:word@"))
    monkeypatch.delenv("no_proxy", raising=False)
    with pytest.raises(latticekeep.InvalidError) as failure:
        Client("https://vault.example.org", retries=0).v2.list_keys()
    assert proxy.connections == 0 and "word" not in str(failure.value)


def test_a_line_of_the_tail_is_bounded(stub: Start) -> None:
    server = stub(Reply(200, text="data: " + "x" * (3 << 20)))
    with pytest.raises(latticekeep.LatticekeepError, match="too long"):
        list(server.client().v2.tail_audit_log())


def test_a_forked_process_opens_connections_of_its_own(stub: Start) -> None:
    server = stub(OK)
    client = server.client()
    create(client)
    pid = os.fork()
    if pid == 0:
        try:
            create(client)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0 and server.connections == 2
    create(client)  # the parent's connection is as good as before
    assert server.connections == 2
