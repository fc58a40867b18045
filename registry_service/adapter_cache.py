"""Whole adapters in memory, for ResolveAdapter: kept current by the change log, one indexed query on a miss."""

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from registry_service import records
from registry_service.database import Database
from registry_service.models import AdapterVersion
from registry_service.records import AdapterRecord, LoggedChange
from registry_service.single_flight import SingleFlight

ABSENT_SECONDS = 2.0
MAX_ABSENT = 10_000
MAX_OTHERS = 256  # versions of one adapter beside those that it names


class AdapterKey(NamedTuple):
    namespace: str
    name: str


class AdapterCache:
    """An LRU of `capacity` adapters. That there is no adapter of a name is remembered for a moment."""

    def __init__(self, database: Database, capacity: int) -> None:
        self._database = database
        self._capacity = capacity
        self._records: OrderedDict[AdapterKey, AdapterRecord] = OrderedDict()
        self._absent: OrderedDict[AdapterKey, float] = OrderedDict()  # until when
        self._known_revision = 0  # of the newest change that this process has heard of
        self._loads: SingleFlight[AdapterRecord | None] = SingleFlight()
        self.num_hits = self.num_absent = self.num_misses = 0  # of `get`

    def __len__(self) -> int:
        return len(self._records)

    async def get(self, namespace: str, name: str, *, is_current: bool) -> AdapterRecord | None:
        """The adapter, deleted or not. Without `is_current` the log could not be followed: then the database is asked.

        Raises:
            RegistryUnavailable: the database cannot be reached.
        """
        key = AdapterKey(namespace, name)
        if is_current:
            if (found := self._records.get(key)) is not None:
                self._records.move_to_end(key)
                self.num_hits += 1
                return found
            if time.monotonic() < self._absent.get(key, 0.0):
                self.num_absent += 1
                return None
        self.num_misses += 1
        # A load that began before a change was heard of must not answer those who come after it.
        return await self._loads.run((key, self._known_revision), "", lambda: self._load(key))

    async def version(self, record: AdapterRecord, wanted: int | str) -> AdapterVersion | None:
        """The adapter's live version of this number or digest."""
        for version in record.versions.values():
            if wanted in (version.number, version.digest):
                return version
        if wanted not in record.others:
            found = await records.live_version(self._database, record.adapter.uid, wanted)
            if len(record.others) >= MAX_OTHERS:
                record.others.clear()
            record.others[wanted] = found
        return record.others[wanted]

    def forget(self, namespace: str, name: str, revision: int) -> None:
        """The adapter was changed by this process, at `revision`; the log will tell a moment later."""
        self._known_revision = max(self._known_revision, revision)
        self._records.pop(AdapterKey(namespace, name), None)
        self._absent.pop(AdapterKey(namespace, name), None)

    def follow(self, changes: Sequence[LoggedChange] | None) -> None:
        """What the log says; None: it does not continue what was heard before."""
        if changes is None:
            self._records.clear()
            self._absent.clear()
            self._known_revision = 0
            return
        for change in changes:
            key = AdapterKey(change.record.adapter.namespace, change.record.adapter.name)
            self._absent.pop(key, None)
            if (known := self._records.get(key)) is not None and known.revision < change.record.revision:
                self._records[key] = change.record
            self._known_revision = max(self._known_revision, change.revision)

    async def close(self) -> None:
        """Stops what is being read."""
        await self._loads.close()

    async def _load(self, key: AdapterKey) -> AdapterRecord | None:
        found, revision = await records.record(self._database, *key)
        if revision < self._known_revision:
            return found  # perhaps of before a change, so it is not kept
        if found is None:
            self._absent[key] = time.monotonic() + ABSENT_SECONDS
            if len(self._absent) > MAX_ABSENT:
                self._absent.popitem(last=False)
        else:
            self._records[key] = found
            if len(self._records) > self._capacity:
                self._records.popitem(last=False)
        return found
