"""Says at start that a service takes calls from other machines and asks nobody who they are."""

import ipaddress
import logging

from shared.auth.settings import AccessSettings

log = logging.getLogger(__name__)


def warn_of_open_access(settings: AccessSettings, listen: str) -> None:
    """Log one line if `listen` is reached from other machines, and no setting tells callers apart."""
    is_told_apart = (
        settings.auth_token_file or settings.auth_jwks_file or settings.auth_certificates or settings.tls_client_ca
    )
    if not is_told_apart and not is_local(listen):
        log.warning(
            "anybody who reaches %s may do everything: set auth_token_file, auth_jwks_file or tls_client_ca, or listen "
            "on 127.0.0.1",
            listen,
        )


def is_local(listen: str) -> bool:
    """Whether only this machine reaches the address `listen` ("host:port" or "unix:path"); other names may be any."""
    if listen.startswith("unix:"):
        return True
    host = listen.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
