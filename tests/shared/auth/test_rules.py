"""The table of rules: it covers every RPC of the contract, and the documentation says the same."""

from pathlib import Path

import pytest

from loraplex.inference.v1 import control_pb2, inference_pb2
from loraplex.registry.v1 import registry_pb2
from shared.auth.caller import ANONYMOUS, INCLUDED, ROLES, Caller, authorize, granted
from shared.auth.rules import RULES
from shared.errors import AdapterNotFound, PermissionDenied

SECURITY = Path(__file__).parents[3] / "docs" / "security.md"
FILES = (registry_pb2, inference_pb2, control_pb2)


def test_every_rpc_has_a_rule_and_every_rule_an_rpc():
    services = [service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()]
    assert {f"/{s.full_name}/{method.name}" for s in services for method in s.methods} == set(RULES)


def test_the_documentation_has_the_table():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in SECURITY.read_text().splitlines()]
    documented = {(row[0], row[1]): (row[2], row[4]) for row in rows if len(row) == 5 and row[0].endswith("Service")}
    wanted = {tuple(method[1:].rpartition(".")[2].split("/")): rule for method, rule in RULES.items()}
    assert documented.keys() == wanted.keys()
    for key, rule in wanted.items():
        roles, audit = documented[key]
        assert {role.strip() for role in roles.split(",")} == rule.roles, key
        assert (audit == "yes") == rule.is_change, key


def test_what_changes_something_is_audited_and_needs_more_than_reading():
    for method, rule in RULES.items():
        rpc = method.rpartition("/")[2]
        is_read = rpc.startswith(("Get", "List", "Resolve", "Watch", "Report", "Generate", "Tokenize", "Detokenize"))
        assert rule.is_change != is_read, method
        assert not (rule.is_change and "reader" in rule.roles), method


def test_roles_include_one_another():
    assert set(INCLUDED) == ROLES
    assert granted(["a"], ["admin", "replica"]) == {"a": INCLUDED["admin"], "*": frozenset(["replica"])}
    assert granted(["a"], ["replica"]) == {"*": frozenset(["replica"])}
    assert granted(["a"], []) == {}


def test_without_authentication_there_is_one_namespace():
    for role in ROLES:
        authorize(ANONYMOUS, "default", role)
        assert ANONYMOUS.has_everywhere([role])
        with pytest.raises(AdapterNotFound):
            authorize(ANONYMOUS, "other", role)


def test_no_role_is_not_found_and_another_is_denied():
    caller = Caller("x", "a", granted(["a"], ["reader"]), "token")
    authorize(caller, "a", ["reader", "replica"])
    with pytest.raises(PermissionDenied) as denied:
        authorize(caller, "a", "writer")
    assert denied.value.metadata == {"role": "writer"}
    with pytest.raises(AdapterNotFound) as missing:
        authorize(caller, "b", "reader", "x")
    assert missing.value.metadata == {"adapter": "namespaces/b/adapters/x"}
    assert not caller.has_everywhere(["reader"])
