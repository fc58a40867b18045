"""What gRPC's C core reads from the environment of the processes that serve with it, or call."""

import os
from collections.abc import Mapping

# At INFO, the level unless one is set, it writes what the other end says of its leaving (GOAWAY) to standard error as
# it is, newlines included, and at ERROR the server name that a TLS client asks for: whoever reaches a port could write
# lines of the log, of the audit log too, without a token or certificate. What calls fail of is in their status.
_OURS = {"GRPC_VERBOSITY": "NONE"}

# Of processes that start others: gRPC would start its threads again in a child that uvloop forks, and often enough
# these crash before it has become the program that it shall be.
_NO_FORK_HANDLERS = {"GRPC_ENABLE_FORK_SUPPORT": "0"}


def grpc_environment(*, starts_processes: bool = False, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables to set before gRPC is used; before it is imported, for who `starts_processes`.

    The verbosity is the operator's if `env` has one.
    """
    ours = {name: env.get(name) or value for name, value in _OURS.items()}
    return ours | (_NO_FORK_HANDLERS if starts_processes else {})
