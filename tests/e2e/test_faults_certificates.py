"""Certificates of both services are replaced under load: streams go on, and no connection fails for it."""

import asyncio
import ssl
import time
from pathlib import Path

import pytest
from cryptography import x509

from examples.stack import free_address, wait_for_base_model
from loraplex import Client, ClientIdentity
from tests.e2e.tiny_stack import BASE, TinyWorld, register_content
from tests.e2e.traffic import Traffic, ask, assert_is_of, at_last, long_streams
from tests.shared.auth.authority import Authority

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RESIDENT = {"": "", "content-0": "content-0"}
SECONDS = 60.0


async def served_serial(address: str, ca: Path) -> int:
    """The serial number of the certificate that a new connection is shown, which the CA has signed."""
    context = ssl.create_default_context(cafile=str(ca))
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()
    return x509.load_der_x509_certificate(shown).serial_number


async def until_served(address: str, authority: Authority, serial: int) -> float:
    """Seconds until the certificate is shown; no connection may fail meanwhile."""
    started = time.monotonic()
    while await served_serial(address, authority.cert) != serial:
        assert time.monotonic() < started + SECONDS
        await asyncio.sleep(0.05)
    return time.monotonic() - started


async def test_certificates_are_rotated(world: TinyWorld, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    flags = {}
    for service in ("registry", "inference"):
        files = authority.issue(service, "localhost")
        flags[service] = [
            f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--health-listen={free_address()}",
        ]  # fmt: skip
    registry, inference = (f"localhost:{free_address().rpartition(':')[2]}" for _ in range(2))
    stack = world.stack(
        tmp_path / "run",
        *flags["inference"],
        f"--registry-ca={authority.cert}",
        registry=registry,
        inference=inference,
        registry_flags=flags["registry"],
    )
    identity = ClientIdentity(ca=str(authority.cert))
    async with stack, Client(inference, registry, identity) as client:
        await wait_for_base_model(client, BASE)
        await register_content(client, "content-0", "content-0")
        async with Traffic(world, client, RESIDENT) as traffic:
            for service, address in (("registry", registry), ("inference", inference)):
                before = await served_serial(address, authority.cert)
                streams = await long_streams(client, RESIDENT)
                files = authority.issue(service, "localhost")  # the certificate first, then its key
                serial = x509.load_pem_x509_certificate(files.cert.read_bytes()).serial_number
                assert serial != before
                seconds = await until_served(address, authority, serial)
                for stream in streams:
                    await stream.check(world)
                async with Client(inference, registry, identity) as another:
                    assert_is_of(world, "", 0, (await at_last(lambda c=another: ask(c, 0), SECONDS))[0])
                await traffic.answers(8)
                print(f"{service}: the new certificate is shown after {seconds:.2f} s")
        # The replica, whose connection to the registry is older than the certificate, hears of what is new.
        await register_content(client, "new", "content-1")
        assert_is_of(world, "content-1", 0, await ask(client, 0, "new"))
    assert [service.process and service.process.returncode for service in (stack.registry, stack.inference)] == [0, 0]
