"""Every operation has its method."""

from __future__ import annotations

import re
from typing import List, Set

import pytest

from latticekeep import V1, V2, Client

EXTRA = re.compile(r"iterate_\w+|\w+_with_etag")


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def operations(contract: str) -> List[str]:
    return re.findall(r"^ +operationId: (\w+)$", contract, re.MULTILINE)


def methods(kind: type) -> Set[str]:
    return {n for n in dir(kind) if not n.startswith("_") and not EXTRA.fullmatch(n)}


@pytest.mark.parametrize("kind", [V1, V2])
def test_every_operation_has_a_method(client: Client, kind: type) -> None:
    contract = client.v1.get_contract() if kind is V1 else client.v2.get_contract()
    ids = operations(contract)
    assert len(ids) == len(re.findall(r"^    (?:get|post|put|patch|delete):$", contract, re.M))
    assert {snake(i) for i in ids} == methods(kind)
    assert all(getattr(kind, name).__doc__ for name in methods(kind))
