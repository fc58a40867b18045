"""What the command line says when TLS does not come about: gRPC's own cause, and the flag to look at."""

import asyncio
from pathlib import Path

import pytest

from registry_service.config import RegistryConfig
from registry_service.server import start
from tests.loraplex.cli_fakes import run_cli
from tests.shared.auth.authority import Authority


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], ["no registry service answers at", "or it speaks TLS: --ca;", "Socket closed"]),
        (["--ca", "CA"], ["or it wants a certificate: --cert and --key;", "Socket closed"]),
        (["--ca", "OTHER"], ["no TLS with the registry service at", "CERTIFICATE_VERIFY_FAILED"]),
    ],
)
async def test_the_cause_is_told(tmp_path: Path, flags: list[str], told: list[str]) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    files = authority.issue("server", "localhost")
    registry = await start(
        RegistryConfig(
            listen="localhost:0",
            database=f"sqlite:///{tmp_path}/registry.db",
            tls_cert=str(files.cert),
            tls_key=str(files.key),
            tls_client_ca=str(authority.cert),
        )
    )
    paths = {"CA": str(authority.cert), "OTHER": str(other.cert)}
    command = [
        *(paths.get(flag, flag) for flag in flags),
        "adapter",
        "list",
        "--registry",
        f"localhost:{registry.port}",
    ]
    ran = await asyncio.to_thread(run_cli, *command)
    await registry.stop()
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("UNAVAILABLE: ")
    assert [words for words in told if words not in ran.err] == [], ran.err
