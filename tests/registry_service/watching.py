"""A watch as a test reads it, and many adapters at once without files."""

import asyncio
import contextlib
import time
from datetime import UTC, datetime

import grpc
import pytest
from sqlalchemy import event

from loraplex.registry.v1 import registry_pb2
from registry_service import repository
from registry_service.models import READY, UPSERT, AdapterVersion
from registry_service.rows import new_adapter
from shared.status import from_rpc_error

SECONDS = 30


class Watch:
    """One stream, and what it has said so far."""

    def __init__(self, stub, **fields):
        self._call = stub.WatchAdapters(registry_pb2.WatchAdaptersRequest(**{"parent": "namespaces/-", **fields}))
        self.responses = []
        self.changes = []
        self.arrivals = []  # when each change came

    @property
    def token(self):
        return self.responses[-1].resume_token

    @property
    def revisions(self):
        return [change.revision for change in self.changes]

    @property
    def names(self):
        return [change.adapter.name.rpartition("/")[2] for change in self.changes]

    async def next(self):
        """The next response."""
        async with asyncio.timeout(SECONDS):
            response = await self._call.read()
        if response is grpc.aio.EOF:
            raise AssertionError("the stream ended without an error")
        self.responses.append(response)
        self.changes += response.changes
        self.arrivals += [time.monotonic()] * len(response.changes)
        return response

    async def complete(self):
        """Reads up to the response that ends the snapshot, or what was missed."""
        while not (await self.next()).snapshot_complete:
            pass
        return self

    async def until(self, count):
        """Reads until there are `count` changes."""
        while len(self.changes) < count:
            await self.next()
        return self

    async def refused(self, error):
        """The error that the stream must end with."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.until(1 << 60)
        found = from_rpc_error(caught.value)
        assert type(found) is error, found.summary
        return found

    def cancel(self):
        self._call.cancel()


async def add_adapters(database, names, base_model="tiny", description="", together=500):
    """Writes adapters with one version each, every one with its change; `together` in a transaction."""

    async def write(session, part):
        for name in part:
            now = datetime.now(UTC)
            adapter = new_adapter("default", name, base_model, {}, description, now)
            version = AdapterVersion(
                uid=f"v-{name}", adapter_uid=adapter.uid, number=1, digest="sha256:" + "0" * 64,
                source={"uri": "file://main/a", "credential_ref": ""}, pinned_sources=[], manifest=[], lora_config={},
                warnings=[], base_model_fingerprint="", size_bytes=1, num_tensors=1, state=READY, creator="test",
                create_time=now,
            )  # fmt: skip
            session.add(adapter)
            await session.flush()
            session.add(version)
            await repository.record_change(session, adapter, UPSERT, now)

    for first in range(0, len(names), together):
        await database.write(lambda session, first=first: write(session, names[first : first + together]))


@contextlib.contextmanager
def count_queries(database, about=""):
    """The statements with this word that are executed meanwhile."""
    statements = []

    def note(connection, cursor, statement, *_):
        if about in statement:
            statements.append(statement)

    engines = [database.engine.sync_engine, getattr(database.lookups, "sync_engine", database.lookups)]
    for engine in engines:
        event.listen(engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        for engine in engines:
            event.remove(engine, "before_cursor_execute", note)
