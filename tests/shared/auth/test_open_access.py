"""A service that anybody may call from elsewhere says so, once."""

import logging

import pytest

from shared.auth.open_access import is_local, warn_of_open_access
from shared.auth.settings import AccessSettings


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("127.0.0.1:0", True),
        ("127.9.9.9:1", True),
        ("localhost:50051", True),
        ("[::1]:50051", True),
        ("unix:/run/x.sock", True),
        ("0.0.0.0:50051", False),
        ("[::]:50051", False),
        ("10.0.0.1:50051", False),
        ("registry.example.com:50051", False),
    ],
)
def test_which_addresses_only_this_machine_reaches(listen: str, expected: bool) -> None:
    assert is_local(listen) is expected


def test_only_an_open_port_without_any_authentication_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for settings in (
        AccessSettings(auth_token_file="t"),
        AccessSettings(auth_jwks_file="j"),
        AccessSettings(tls_client_ca="c"),
    ):
        warn_of_open_access(settings, "0.0.0.0:1")
    warn_of_open_access(AccessSettings(), "127.0.0.1:1")
    assert caplog.text == ""
    warn_of_open_access(AccessSettings(tls_cert="c", tls_key="k"), "0.0.0.0:1")
    (record,) = caplog.records
    assert record.getMessage().startswith("anybody who reaches 0.0.0.0:1 may do everything: set auth_token_file")
