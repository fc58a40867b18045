"""Whatever the fields hold, the answer is never INTERNAL."""

import itertools
import random
import re
import string
from collections import Counter

import grpc
from google.protobuf.descriptor import FieldDescriptor

from loraplex.registry.v1 import registry_pb2
from shared.errors import LoraplexError

WORDS = [
    "", "a", "tiny", "latest", "prod", "1", "a@1", "a@prod", "default/a", "namespaces/default", "namespaces/-",
    "namespaces/default/adapters/a", "namespaces/default/adapters/a/versions/1", "baseModels/tiny", "file://main/a",
    "file://main/", "file:///", "nosuch://", "\0", "\x7f", "é", "\U0001f600", "a" * 300, "9" * 40, "-", "..", "@", "{}",
    "sha256:" + "0" * 64, "00000000-0000-4000-8000-000000000000", "%00", "' OR 1=1 --", "\ud7ff", "a\nb",
    "name = a", "labels.k != 'x' OR NOT state = READY", "create_time desc", "create_time > 2026-01-01T00:00:00Z",
    "rank > 1", "*", "labels", "residency", "default_alias",
]  # fmt: skip
NUMBERS = [0, 1, -1, 2, 1000, (1 << 31) - 1, -(1 << 31)]
LARGE = [*NUMBERS, (1 << 63) - 1, -(1 << 63)]
RPCS = [
    method.name
    for method in registry_pb2.DESCRIPTOR.services_by_name["AdapterRegistryService"].methods
    if method.name not in ("WatchAdapters",)
]


def fill(message, rng):
    """Random fields of `message`, nested ones too."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.3:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name).update({value(rng): value(rng) for _ in range(rng.randrange(3))})
        elif field.message_type is not None:
            for _ in range(rng.randrange(3) if field.is_repeated else 1):
                child = getattr(message, field.name)
                fill(child.add() if field.is_repeated else child, rng)
        elif field.is_repeated:
            getattr(message, field.name).extend(scalar(field, rng) for _ in range(rng.randrange(3)))
        else:
            setattr(message, field.name, scalar(field, rng))
    return message


def scalar(field, rng):
    if field.type == FieldDescriptor.TYPE_STRING:
        return value(rng)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return rng.random() < 0.5
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.choice([0.0, 1.0, -1.0, float("nan"), float("inf"), 5e-324])
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.randrange(3)
    return rng.choice(
        NUMBERS if field.type == FieldDescriptor.TYPE_INT32 else LARGE[:-2] if rng.random() < 0.9 else LARGE
    )


def value(rng):
    if rng.random() < 0.8:
        return rng.choice(WORDS)
    return "".join(rng.choice(string.printable + "\0é/@:") for _ in range(rng.randrange(20)))


async def test_fuzzed_fields(registry, folders):
    await registry.register(uri=folders.write())
    for rpc, seed in itertools.product(RPCS, range(60)):
        rng = random.Random(f"{rpc} {seed}")
        request = fill(getattr(registry_pb2, f"{rpc}Request")(), rng)
        if rpc == "ResolveAdapter" and request.min_revision > 1:
            request.min_revision = 1  # else each waits for its revision
        code = await _code(registry, rpc, request)
        assert code not in ("UNKNOWN", "INTERNAL"), request
    assert (await registry("GetBaseModel", name="tiny")).name


async def test_fuzzed_watches(registry, folders):
    await registry.register(uri=folders.write())
    codes = Counter()
    for seed in range(120):
        rng = random.Random(f"watch {seed}")
        request = fill(registry_pb2.WatchAdaptersRequest(), rng)
        if rng.random() < 0.5:
            request.parent = "namespaces/-"
            request.base_model = ""
        call = registry.stub.WatchAdapters(request)
        try:
            await call.read()
            codes["OK"] += 1
        except grpc.aio.AioRpcError as error:
            codes[error.code().name] += 1
        call.cancel()
    assert set(codes) <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "OUT_OF_RANGE"}
    assert len(codes) > 1


def _names_fields(error, request):
    """Whether an INVALID_ARGUMENT says which fields of the request are wrong."""
    named = {re.split(r"[.\[]", violation.field)[0] for violation in getattr(error, "violations", ())}
    return error.code != "INVALID_ARGUMENT" or (named and named <= set(request.DESCRIPTOR.fields_by_name))


async def _code(registry, rpc, request):
    try:
        await registry(rpc, **{field.name: value for field, value in request.ListFields()})
    except LoraplexError as error:
        return error.code if _names_fields(error, request) else "INTERNAL"
    return "OK"
