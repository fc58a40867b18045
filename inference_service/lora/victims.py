"""Which adapters make room for another. Pure."""

from collections.abc import Sequence
from typing import NamedTuple

from inference_service.lora.residents import Resident


class Shortage(NamedTuple):
    """What is missing: bytes and slots, and bytes that `owner` must give up before it may have more."""

    nbytes: int
    slots: int
    owner: str
    excess: int


def choose_victims(evictable: Sequence[Resident], shortage: Shortage) -> list[Resident] | None:
    """The least recently used of `evictable`, which is in that order, that have what is missing; less those without
    whom it is not missing. None if all of them have too little."""
    nbytes, at_least, owner, excess = shortage
    victims: list[Resident] = []
    for resident in evictable:
        if excess > 0 and resident.owner == owner:
            victims.append(resident)
            excess -= resident.nbytes
            nbytes -= resident.nbytes
    num_own = len(victims)
    for resident in evictable:
        if nbytes <= 0 and len(victims) >= at_least:
            break
        if resident not in victims[:num_own]:
            victims.append(resident)
            nbytes -= resident.nbytes
    if excess > 0 or nbytes > 0 or len(victims) < at_least:
        return None
    for victim in reversed(victims[num_own:]):
        if victim.nbytes + nbytes <= 0 and len(victims) > at_least:
            nbytes += victim.nbytes
            victims.remove(victim)
    return victims
