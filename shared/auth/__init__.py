"""Who calls, and what they may do. The same rules serve both services.

    authenticator     who calls: tokens (a file), json_web_tokens, certificates
    rules             who may call what
    gate              the interceptor that applies both, and audit, which writes down what was changed
    settings          what an operator configures

Without authentication everybody is the namespace `default` with every role, and no other namespace exists.
"""

from shared.auth.caller import (
    ANONYMOUS,
    DEFAULT_NAMESPACE,
    Caller,
    Role,
    authorize,
    caller_of,
    changed_nothing,
    no_adapter,
)

__all__ = [
    "ANONYMOUS",
    "DEFAULT_NAMESPACE",
    "Caller",
    "Role",
    "authorize",
    "caller_of",
    "changed_nothing",
    "no_adapter",
]
