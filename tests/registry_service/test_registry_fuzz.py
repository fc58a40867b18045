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
from shared.status import from_rpc_error

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


# ---- one wrong field in a request that is right otherwise

NAME, OF_VERSION, OF_ALIAS = (f"namespaces/default/adapters/a{rest}" for rest in ("", "/versions/1", "/aliases/prod"))
DIGEST = "sha256:" + "0" * 64
RIGHT = {
    "RegisterAdapter": {
        "parent": "namespaces/default", "adapter_id": "a", "base_model": "tiny", "labels": {"k": "v"},
        "source": {"uri": "file://main/a", "credential_ref": "c"}, "description": "d", "aliases": ["prod"],
        "request_id": "00000000-0000-4000-8000-000000000000",
    },
    "ResolveAdapter": {"reference": "a@prod", "base_model": "tiny"},
    "WatchAdapters": {"parent": "namespaces/default", "base_model": "tiny", "resume_token": "e30"},
    "GetAdapter": {"name": NAME},
    "ListAdapters": {"parent": "namespaces/default", "page_token": "e30", "filter": "name = a", "order_by": "name"},
    "UpdateAdapter": {
        "adapter": {
            "name": NAME, "default_alias": "prod", "labels": {"k": "v"}, "annotations": {"k": "v"}, "description": "d",
        },
        "update_mask": {"paths": ["*"]},
    },
    "DeleteAdapter": {"name": NAME, "etag": '"e"'},
    "UndeleteAdapter": {"name": NAME},
    "GetAdapterVersion": {"name": OF_VERSION},
    "ListAdapterVersions": {"parent": NAME, "page_token": "e30", "filter": "rank > 1", "order_by": "version"},
    "DeleteAdapterVersion": {"name": OF_VERSION, "etag": '"e"'},
    "SetAdapterAlias": {"name": OF_ALIAS, "targets": [{"version": 1, "weight": 1.0}], "etag": '"e"'},
    "DeleteAdapterAlias": {"name": OF_ALIAS, "etag": '"e"'},
    "RegisterBaseModel": {
        "id": "tiny", "config_json": "{}", "fingerprint": DIGEST, "weights_fingerprint": DIGEST,
    },
    "GetBaseModel": {"name": "tiny"},
    "ListBaseModels": {"page_token": "e30"},
    "ReportReplicaState": {
        "replica": "r", "base_model": "tiny", "resident": [{"digest": DIGEST, "level": 2, "reason": "r"}],
        "removed": [DIGEST[:-1] + "1"],
    },
    "ListReplicas": {"page_token": "e30", "base_model": "tiny"},
}  # fmt: skip
INJECTION = "'; DROP TABLE adapters; --"
WRONG = {
    "huge": "a" * 1_000_000,
    "unicode": "é\U0001f600\u202e",
    "control": "a\0b\x7f",
    "injection": INJECTION,
    "another name": "namespaces/default/projects/a",
    "path": "../../etc/passwd",
}
FREE = ("description", "labels", "annotations", "reason", "credential_ref")  # printable text of some length


def wrong_requests():
    """(rpc, path of the field, kind, request): every text field of every request in turn."""
    for rpc, fields in RIGHT.items():
        for path in _paths(fields):
            right = {name: value for name, value in fields.items() if name == path[0] or not name.endswith("_token")}
            for kind, text in WRONG.items():
                yield rpc, path, kind, _with(right, path, text)


def _paths(value, path=()):
    if isinstance(value, str):
        yield path
    elif isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(inner, (*path, key))


def _with(value, path, text):
    if not path:
        return text
    if isinstance(value, dict):
        return {**value, path[0]: _with(value[path[0]], path[1:], text)}
    return [_with(inner, path[1:], text) if at == path[0] else inner for at, inner in enumerate(value)]


def test_every_text_field_is_tried():
    for rpc, fields in RIGHT.items():
        described = getattr(registry_pb2, f"{rpc}Request").DESCRIPTOR
        texts = {field.name for field in described.fields if field.type == FieldDescriptor.TYPE_STRING}
        assert texts <= set(fields), rpc
    assert {*RPCS, "WatchAdapters"} == set(RIGHT)


async def test_one_wrong_field(registry, folders):
    await registry.register(uri=folders.write(), aliases=["prod"])
    unexpected = []
    for rpc, path, kind, fields in wrong_requests():
        if rpc == "ReportReplicaState" and "removed" not in path:
            fields = {**fields, "removed": [], "full": True}
        code, named = await _refusal(registry, rpc, fields)
        if path[0] == "etag":
            is_right = code == "ABORTED"  # it is compared, not read
        elif any(name in FREE for name in path) and kind not in ("huge", "control"):
            is_right = code not in ("INTERNAL", "UNKNOWN")
        else:
            is_right = code == "INVALID_ARGUMENT" and bool(named) and all(field.startswith(path[0]) for field in named)
        if not is_right:
            unexpected.append((rpc, path, kind, code, named))
    assert not unexpected[:5]
    assert (await registry.adapter("a")).latest_version == 1


async def _refusal(registry, rpc, fields):
    """The code, and the fields that are complained of."""
    try:
        if rpc == "WatchAdapters":
            call = registry.stub.WatchAdapters(registry_pb2.WatchAdaptersRequest(**fields))
            await call.read()
        else:
            await registry(rpc, **fields)
    except LoraplexError as error:
        return error.code, [violation.field for violation in getattr(error, "violations", ())]
    except grpc.aio.AioRpcError as error:
        found = from_rpc_error(error)
        return found.code, [violation.field for violation in getattr(found, "violations", ())]
    return "OK", []
