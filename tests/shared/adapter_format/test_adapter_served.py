import pytest

from shared.adapter_format.served import KINDS, SERVED_KINDS, check_served
from shared.errors import UnsupportedAdapter
from tests.shared.adapter_format.adapter_samples import bind, tensors


def test_every_served_kind_is_a_kind():
    assert set(KINDS) >= SERVED_KINDS >= {"lora"}


@pytest.mark.parametrize("kind", KINDS)
def test_registry_and_replica_ask_the_same(kind):
    bound = bind(tensors())._replace(kinds=("lora", kind))
    if kind in SERVED_KINDS:
        check_served(bound)
        return
    with pytest.raises(UnsupportedAdapter, match=kind) as caught:
        check_served(bound)
    assert caught.value.metadata == {"kind": kind, "key": KINDS[kind]}
