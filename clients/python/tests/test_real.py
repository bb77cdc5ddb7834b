"""Behaviour against the real server."""

from __future__ import annotations

import io
import json
import os
import secrets
import ssl
import threading
import urllib.request
from typing import Callable, List

import pytest

import latticekeep
from latticekeep import Client


def unique(name: str) -> str:
    return name + "-" + secrets.token_hex(8)


def system() -> Client:
    return Client(os.environ["LATTICEKEEP_URL"], api_key=os.environ["TEST_SYSTEM_KEY"])


def let_an_hour_pass() -> None:
    urllib.request.urlopen(os.environ["TEST_CLOCK_URL"]).close()


def test_the_life_of_a_credential(client: Client) -> None:
    v2, name, own = client.v2, unique("life"), secrets.token_hex(16)
    sealed = v2.seal_credential(
        name=name, credential_type="database", values={"a": "1", "b": "2"}, idempotency_key=own
    )
    again = v2.seal_credential(
        name=name, credential_type="database", values={"a": "1", "b": "2"}, idempotency_key=own
    )
    assert again["credential_id"] == sealed["credential_id"]
    identifier = sealed["credential_id"]

    v2.patch_credential(identifier, values={"a": None, "c": "3"})
    read = v2.unseal_credential_by_name(name)
    assert read["values"] == {"b": "2", "c": "3"} and read["version"] == 2

    v2.describe_credential(identifier, description="of a test", tags=["pci"])
    found = [c["name"] for c in v2.list_credentials(q=name, tag="pci", total=True)["credentials"]]
    assert found == [name]
    v2.rename_credential(identifier, name=name + "-2")
    v2.trash_credential(identifier)
    with pytest.raises(latticekeep.ForbiddenError):
        v2.unseal_credential(identifier)
    v2.delete_credential(identifier)
    with pytest.raises(latticekeep.ForbiddenError):
        v2.get_credential_metadata(identifier)


def test_a_change_depends_on_the_entity_tag(client: Client) -> None:
    v2, name = client.v2, unique("tag")
    v2.put_credential_by_name(name, credential_type="t", values={"k": "1"}, if_none_match="*")
    with pytest.raises(latticekeep.PreconditionFailedError):
        v2.put_credential_by_name(name, credential_type="t", values={"k": "2"}, if_none_match="*")
    read, etag = v2.unseal_credential_by_name_with_etag(name)
    identifier = read["credential_id"]
    assert etag
    assert v2.unseal_credential_with_etag(identifier)[1] == etag
    assert v2.get_credential_metadata_with_etag(identifier)[1] == etag
    with pytest.raises(latticekeep.NotModifiedError):
        v2.unseal_credential_by_name(name, if_none_match=etag, wait=1)
    v2.rotate_credential(identifier, if_match=etag)
    with pytest.raises(latticekeep.PreconditionFailedError) as failure:
        v2.delete_credential(identifier, if_match=etag)
    assert failure.value.status == failure.value.code == 412
    v2.delete_credential(identifier, if_match="*")


@pytest.mark.parametrize(
    "name", ["a b", "a/b", "a?b#c", "a%2Fb", "über/ß", "...", "%2E%2E", "a/..b", "a;b=c&d"]
)
def test_names_reach_their_credential_only(client: Client, name: str) -> None:
    name = unique(name)
    sealed = client.v2.seal_credential(name=name, credential_type="t", values={"k": name})
    read = client.v2.unseal_credential_by_name(name)
    assert read["credential_id"] == sealed["credential_id"] and read["values"] == {"k": name}


@pytest.mark.parametrize("name", [".", ".."])
def test_dots_reach_no_other_endpoint(client: Client, name: str) -> None:
    with pytest.raises(latticekeep.ForbiddenError):
        client.v2.unseal_credential(name)
    with pytest.raises(latticekeep.ForbiddenError):
        client.v2.unseal_credential_by_name(name)


def test_lists_are_read_to_the_end(client: Client) -> None:
    prefix = unique("list") + "/"
    names = [f"{prefix}{n}" for n in range(5)]
    for name in names:
        client.v2.seal_credential(name=name, credential_type="t", values={"k": "v"})
    listed = list(client.v2.iterate_credentials(prefix=prefix, limit=2))
    assert sorted(c["name"] for c in listed) == names
    pages = list(latticekeep.paginate(client.v2.list_credentials, prefix=prefix, limit=2))
    assert len(pages) >= 3 and sum(len(p["credentials"]) for p in pages) == 5
    assert len(list(client.v2.iterate_audit_log(limit=7))) >= 5


def test_errors_have_their_kind_and_no_path(client: Client) -> None:
    stranger = Client(os.environ["LATTICEKEEP_URL"])
    calls: List[Callable[[], object]] = [
        lambda: client.v2.unseal_credential_by_name("s3cr3t-name"),
        lambda: client.v2.get_key("s3cr3t-name"),
        lambda: client.v2.list_credentials(cursor="s3cr3t-name"),
        lambda: client.v2.seal_credential(name="", credential_type="t", values={"k": "s3cr3t"}),
        lambda: stranger.v2.unseal_credential_by_name("s3cr3t-name"),
        lambda: client.v2.list_tenants(),
        lambda: client.v2.create_review(subject="access", note="s3cr3t"),
        lambda: system().v2.accept_rollback(reason="s3cr3t"),
    ]
    kinds = [
        latticekeep.ForbiddenError,
        latticekeep.NotFoundError,
        latticekeep.InvalidError,
        latticekeep.InvalidError,
        latticekeep.UnauthenticatedError,
        latticekeep.ForbiddenError,
        latticekeep.ForbiddenError,
        latticekeep.ConflictError,
    ]
    for call, kind in zip(calls, kinds):
        with pytest.raises(kind) as failure:
            call()
        error = failure.value
        assert error.status == error.code and error.message and error.request_id.startswith("req_")
        assert "s3cr3t" not in str(error) + repr(error) and "/api/" not in str(error)
        assert error.request_id in str(error)


def test_version_1_takes_the_key_as_a_bearer_token(client: Client) -> None:
    key = client.v1.generate_key(algorithm="ML-KEM-768", name=unique("v1"), rotation_period=30)
    sealed = client.v1.encrypt_data(data="text", algorithm="ML-KEM-768", key_id=key["key_id"])
    data, by = sealed["encrypted_data"], sealed["key_id"]
    assert client.v1.decrypt_data(encrypted_data=data, key_id=by)["data"] == "text"
    assert client.v1.rotate_key(key["key_id"])["version"] == 2
    assert key["key_id"] in [k["key_id"] for k in client.v1.list_keys(limit=100)["keys"]]
    assert list(client.v1.iterate_audit_logs(limit=5))
    with pytest.raises(latticekeep.NotFoundError) as failure:
        client.v1.rotate_key("tkey_of_nobody")
    assert failure.value.details


def test_batches_answer_each_item(client: Client) -> None:
    encrypted = client.v2.encrypt_batch(items=[{"data": "a"}, {"data": "b"}])["results"]
    items: List[latticekeep.types_v2.DecryptRequest] = [
        {
            "ciphertext_kem": e["ciphertext_kem"],
            "ciphertext_data": e["ciphertext_data"],
            "nonce": e["nonce"],
        }
        for e in encrypted
    ]
    items[1]["nonce"] = items[0]["nonce"]
    first, second = client.v2.decrypt_batch(items=items)["results"]
    assert first["data"] == "a" and "data" not in second


def test_limits_of_a_tenant_can_be_null() -> None:
    v2 = system().v2
    tenant = v2.create_tenant(name=unique("limits"))["tenant"]["tenant_id"]
    assert v2.set_tenant_limits(tenant, v1=7, v2=8)["tenant"]["limits"] == {"v1": 7, "v2": 8}
    assert v2.set_tenant_limits(tenant, v1=None, v2=9)["tenant"]["limits"] == {"v2": 9}


def test_the_tail_goes_on_after_the_last_entry(client: Client) -> None:
    with client.v2.tail_audit_log() as tail:
        assert next(tail)["event_type"] == "AUDIT_READ"  # its own
        client.v2.seal_credential(name=unique("tail"), credential_type="t", values={"k": "v"})
        entry = next(tail)
        assert entry["event_type"] == "CREDENTIAL_SEALED"
        assert tail.last_event_id == entry["sequence"]
    client.v2.get_vault_summary()
    with client.v2.tail_audit_log(last_event_id=tail.last_event_id, wait=0) as more:
        entries = list(more)
    assert entries[0]["event_type"] in ("AUDIT_READ", "CREDENTIAL_LISTED")
    assert all(e["sequence"] > entry["sequence"] for e in entries)
    assert "CREDENTIAL_LISTED" in [e["event_type"] for e in entries]


def test_long_answers_go_to_a_file() -> None:
    v2 = system().v2
    export, backup = io.BytesIO(), io.BytesIO()
    assert v2.export_audit_log(export) == len(export.getvalue())
    assert "checkpoint" in json.loads(export.getvalue().splitlines()[-1])
    assert v2.take_backup(backup, recipient=os.environ["TEST_RECIPIENT"]) > 5381
    assert backup.getvalue().startswith(b"age-encryption.org/v1")
    with pytest.raises(latticekeep.InvalidError):
        v2.take_backup(io.BytesIO(), recipient="age1classic")


def test_reports_are_downloaded_without_a_credential(client: Client) -> None:
    report = client.v2.get_compliance_report(framework="soc2")
    out, signature = io.BytesIO(), io.BytesIO()
    assert client.v2.download_report(report["url"], out) == len(out.getvalue()) > 0
    client.v2.download_report(report["signature_url"], signature)
    with pytest.raises(latticekeep.ForbiddenError):
        client.v2.download_report(report["url"] + "x", io.BytesIO())
    host = "vault.example.org"
    for url in (f"http://{host}/r", f"https://u:p@{host}/r", f"file://{host}/r", "https://[x"):
        with pytest.raises(latticekeep.InvalidError):
            client.v2.download_report(url, io.BytesIO())


def test_bytes_are_answered_as_they_are(client: Client) -> None:
    assert json.loads(client.v2.get_inventory())["bomFormat"] == "CycloneDX"
    assert isinstance(client.v2.get_tile("entries", 0, width=1), bytes)


def test_probes_and_metrics() -> None:
    stranger = Client(os.environ["LATTICEKEEP_URL"])
    assert stranger.v2.get_health()["status"] == stranger.v2.get_readiness()["status"] == "ok"
    with pytest.raises(latticekeep.UnauthenticatedError):
        stranger.v2.get_metrics()
    operator = Client(os.environ["LATTICEKEEP_URL"], api_key=os.environ["TEST_METRICS_KEY"])
    assert "# TYPE" in operator.v2.get_metrics()


def test_a_user_signs_in_and_out(client: Client) -> None:
    url, key = os.environ["LATTICEKEEP_URL"], os.environ["LATTICEKEEP_API_KEY"]
    both = Client(url, api_key=key)
    email, password = os.environ["LATTICEKEEP_EMAIL"], os.environ["LATTICEKEEP_PASSWORD"]
    with pytest.raises(latticekeep.UnauthenticatedError):
        both.v2.login(email=email, password="wrong")
    both.v2.login(email=email, password=password)
    assert both.v2.get_account()["user"]["email"] == email
    assert both.v2.refresh_session()["access_token"]
    assert both.v2.get_account()["user"]["email"] == email
    both.v2.logout()
    both.v2.logout()  # nothing is left to end
    assert "user" not in both.v2.get_account()  # the key again
    with pytest.raises(latticekeep.UnauthenticatedError):
        both.v2.refresh_session()


def test_one_refresh_serves_all_threads(person: Client) -> None:
    let_an_hour_pass()  # the access token has expired
    failures: List[BaseException] = []

    def call() -> None:
        try:
            person.v2.get_account()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Using a refresh token twice ends the session.
    assert not failures
    assert person.v2.get_account()["user"]


def test_logout_needs_no_access_token_that_is_valid(person: Client) -> None:
    let_an_hour_pass()
    person.v2.logout()
    with pytest.raises(latticekeep.UnauthenticatedError):
        person.v2.get_account()


def test_a_session_that_was_ended_is_not_renewed(person: Client) -> None:
    own = [s for s in person.v2.list_sessions()["sessions"] if s["current"]][0]
    other = Client(os.environ["LATTICEKEEP_URL"], api_key=os.environ["LATTICEKEEP_API_KEY"])
    other.v2.login(
        email=os.environ["LATTICEKEEP_EMAIL"], password=os.environ["LATTICEKEEP_PASSWORD"]
    )
    other.v2.end_session(own["session_id"])
    for _ in range(2):
        with pytest.raises(latticekeep.UnauthenticatedError):
            person.v2.get_account()


def test_tls_needs_a_trusted_certificate() -> None:
    url, key = os.environ["TEST_TLS_URL"], os.environ["LATTICEKEEP_API_KEY"]
    trusting = ssl.create_default_context(cafile=os.environ["TEST_TLS_AUTHORITY"])
    with Client(url, api_key=key, ssl_context=trusting) as client:
        assert client.v2.get_vault_summary()["success"]
    with pytest.raises(latticekeep.ConnectionLostError, match="CERTIFICATE_VERIFY_FAILED"):
        Client(url, api_key=key, retries=0).v2.get_vault_summary()
