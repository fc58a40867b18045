"""`loraplex replicas`: which inference replicas report to the registry, and what they hold."""

from collections import Counter
from typing import Annotated

import typer

from loraplex.cli.calls import run
from loraplex.cli.options import DEFAULT_REGISTRY, Json, RegistryAddress
from loraplex.cli.output import moment, print_json, print_table
from loraplex.client import Client
from loraplex.registry.v1 import registry_pb2

_LEVEL = registry_pb2.ResidentState.Level


def replicas(
    base_model: Annotated[str, typer.Option(help="Only those that serve this one.")] = "",
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """List the replicas that report to the registry."""
    request = registry_pb2.ListReplicasRequest(base_model=base_model)

    async def all_replicas(client: Client) -> list[registry_pb2.Replica]:
        return [r async for page in client.pages(client.registry.ListReplicas, request) for r in page.replicas]

    found = run(all_replicas, registry=registry)
    if json:
        return print_json(found)
    return print_table(
        ("REPLICA", "BASE MODEL", "REVISION", "GPU", "HOST", "PINNED", "NOT READY", "LEASE UNTIL"), map(_row, found)
    )


def _row(replica: registry_pb2.Replica) -> tuple[object, ...]:
    levels = Counter(_LEVEL.Name(state.level).removeprefix("LEVEL_") for state in replica.resident)
    reasons = Counter(state.reason for state in replica.resident if state.level == _LEVEL.LEVEL_FAILED)
    not_ready = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
    return (
        replica.name,
        replica.base_model.removeprefix("baseModels/"),
        replica.observed_revision,
        levels["GPU"],
        levels["HOST"],
        sum(state.pinned for state in replica.resident),
        not_ready or "-",
        moment(replica.lease_expire_time),
    )
