"""How the database finds what the registry asks it for: EXPLAIN of the statements that calls really cause."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from sqlalchemy import event

from loraplex.registry.v1 import registry_pb2 as pb
from loraplex.registry.v1 import registry_pb2_grpc
from registry_service.config import RegistryConfig
from registry_service.database import Database
from registry_service.server import start

BACKGROUND_SECONDS = 3.0  # after its start a registry looks for what is old; not to be mixed with the calls
_SCAN = re.compile(r"((?:Parallel )?(?:Seq Scan|Index Scan|Index Only Scan|Bitmap Index Scan)[^(]*|(?:SCAN|SEARCH) .*)")


async def plans(config: RegistryConfig, adapter: str, lists: Mapping[str, Mapping[str, str]]) -> list[str]:
    """One line for each index or table that is read to resolve `adapter` and to list; see LISTS of the benchmark."""
    running = await start(config)
    await asyncio.sleep(BACKGROUND_SECONDS)
    lines: list[str] = []
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
            stub = registry_pb2_grpc.AdapterRegistryServiceStub(channel)
            calls: list[tuple[str, Any, Any]] = [
                ("ResolveAdapter", stub.ResolveAdapter, pb.ResolveAdapterRequest(reference=adapter))
            ]
            for name, fields in lists.items():
                request = pb.ListAdaptersRequest(parent="namespaces/default", **fields)
                calls.append((f"ListAdapters, {name}", stub.ListAdapters, request))
            for name, rpc, request in calls:
                asked: list[tuple[str, Any]] = []

                def note(_c: Any, _k: Any, statement: str, values: Any, *_: Any, asked: Any = asked) -> None:
                    asked.append((statement, values))

                database = running.database
                engines = [database.engine.sync_engine, getattr(database.lookups, "sync_engine", database.lookups)]
                for engine in engines:
                    event.listen(engine, "before_cursor_execute", note)
                await rpc(request)
                for engine in engines:
                    event.remove(engine, "before_cursor_execute", note)
                lines.append(f"{name}:")
                lines += [f"  {line}" for line in await _explained(running.database, asked)]
    finally:
        await running.stop()
    return lines


async def _explained(database: Database, asked: Sequence[tuple[str, Any]]) -> list[str]:
    """What each SELECT reads."""
    is_postgres = database.engine.dialect.name == "postgresql"
    found: list[str] = []
    async with database.engine.connect() as connection:
        for statement, values in asked:
            if statement.startswith("SELECT") and "FROM" in statement:
                head = "EXPLAIN" if is_postgres else "EXPLAIN QUERY PLAN"
                rows = (await connection.exec_driver_sql(f"{head} {statement}", values)).all()
                found += [match.group(1).strip() for row in rows if (match := _SCAN.search(str(row[-1])))]
    return found
