"""What each tenant has been served, of which adapter, and which of its sequences wait and run. Torch-free."""

from bisect import bisect_left
from dataclasses import dataclass, field

from inference_service.engine.sequence import Sequence

ALWAYS = -float("inf")

Place = tuple[int, float, int, int]


def place(sequence: Sequence) -> Place:
    """Its place in its adapter's line, and the order of preemption backwards: higher priority, then earlier arrival."""
    request = sequence.request
    return -request.spec.priority, request.spec.arrival, request.order, sequence.index


@dataclass(eq=False, repr=False, slots=True)
class Share:
    """What a tenant, or an adapter of it, has been served."""

    number: int
    served: int = 0


@dataclass(eq=False, repr=False, slots=True)
class Tenant(Share):
    """One tenant. `virtual`: the virtual time among its flows."""

    name: str = ""
    flows: "dict[str | None, Flow]" = field(default_factory=dict)
    ready: "dict[Flow, None]" = field(default_factory=dict)  # those that wait for nothing but their turn
    running: list[Sequence] = field(default_factory=list)  # sorted by place
    num_waiting: int = 0
    virtual: int = 0


@dataclass(eq=False, repr=False, slots=True, kw_only=True)
class Flow(Share):
    """What one tenant asks of one adapter; `digest` None is the base model.

    `is_ready`: some of it waits and its adapter is there; `changed_at`: since when that is so, or is not so; -inf if
    its adapter was not waited for.
    """

    tenant: Tenant
    digest: str | None
    waiting: list[Sequence] = field(default_factory=list)  # sorted by place
    num_running: int = 0
    is_ready: bool = False
    changed_at: float = ALWAYS


def remove(line: list[Sequence], sequence: Sequence) -> None:
    """Take `sequence` out of a line sorted by place."""
    index = bisect_left(line, place(sequence), key=place)
    assert line[index] is sequence
    del line[index]


def by_service(share: Share) -> int:
    return share.served


def by_service_and_age(share: Share) -> tuple[int, int]:
    return share.served, share.number
