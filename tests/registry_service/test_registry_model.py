"""Random lives of a few adapters against a model in plain dicts, over a real server, on both databases."""

import asyncio
import itertools
import json
import threading

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from registry_service.config import RegistryConfig
from registry_service.server import start
from shared.errors import (
    AdapterDeleted,
    AdapterNotFound,
    EtagMismatch,
    FailedPrecondition,
    InvalidArgument,
    LoraplexError,
    VersionInUse,
)
from tests.registry_service.conftest import TINY, Caller
from tests.registry_service.watching import Watch

EXAMPLES = {"sqlite": (15, 30), "postgres": (5, 20)}  # runs, and steps of each
NAMES, ALIASES, CONTENTS = ["one", "two"], ["prod", "canary"], range(4)
DELETE = 2
PREFIXES = (f"m{number}-" for number in itertools.count())  # each run has adapters of its own

names = st.sampled_from(NAMES)
aliases = st.sampled_from(ALIASES)
contents = st.sampled_from(CONTENTS)
numbers = st.integers(1, 6)


class Model:
    """One adapter as it ought to be."""

    def __init__(self):
        self.versions = {}  # number → content, live ones
        self.next = 1
        self.aliases = {}  # name → {number: weight}
        self.is_deleted = False
        self.default = "latest"
        self.labels = {}

    def targets(self, alias):
        if alias == "latest":
            return {max(self.versions): 1.0} if self.versions else {}
        return self.aliases.get(alias, {})


class Lives(RuleBasedStateMachine):
    """Set by `machine`: `act` runs a coroutine on the server's loop, `registry` is a caller, `digests` by content."""

    @initialize()
    def begin(self):
        self.prefix = next(PREFIXES)
        self.models = {}
        self.watch = self.act(self.opened())

    # ---- what is done

    @rule(name=names, content=contents, alias=st.none() | aliases)
    def register(self, name, content, alias):
        model = self.models.get(name, Model())
        fields = {"aliases": [alias] if alias else []}
        if model.is_deleted:
            return self.refused(AdapterDeleted, self.registry.register(self.prefix + name, uri(content), **fields))
        answer = self.act(self.registry.register(self.prefix + name, uri(content), **fields))
        known = [number for number, held in model.versions.items() if held == content]
        number = known[0] if known else model.next
        assert (answer.created, int(answer.version.name.rpartition("/")[2])) == (not known, number)
        if not known:
            model.versions[number] = content
            model.next += 1
        if alias:
            model.aliases[alias] = {number: 1.0}
        self.models[name] = model
        return self.check(name, answer.adapter)

    @rule(name=names, alias=aliases, weights=st.dictionaries(numbers, st.sampled_from([0.5, 1.0, 9.0]), min_size=1))
    def set_alias(self, name, alias, weights):
        model = self.live(name)
        fields = [{"version": number, "weight": weight} for number, weight in weights.items()]
        call = self.registry("SetAdapterAlias", name=f"{self.prefix}{name}@{alias}", targets=fields)
        if model is None or not weights.keys() <= model.versions.keys():
            return self.refused(AdapterNotFound, call)
        answer = self.act(call)
        model.aliases[alias] = weights
        return self.check(name, answer.adapter)

    @rule(name=names, alias=aliases)
    def delete_alias(self, name, alias):
        model = self.live(name)
        call = self.registry("DeleteAdapterAlias", name=f"{self.prefix}{name}@{alias}")
        if model is not None and model.default == alias:
            return self.refused(FailedPrecondition, call)
        if model is None or alias not in model.aliases:
            return self.refused(AdapterNotFound, call)
        answer = self.act(call)
        del model.aliases[alias]
        return self.check(name, answer.adapter)

    @rule(name=names, number=numbers)
    def delete_version(self, name, number):
        model = self.live(name)
        call = self.registry("DeleteAdapterVersion", name=f"{self.prefix}{name}@{number}")
        if model is None or number not in model.versions:
            return self.refused(AdapterNotFound, call)
        if any(number in targets for targets in model.aliases.values()):
            return self.refused(VersionInUse, call)
        self.act(call)
        del model.versions[number]
        return None

    @rule(name=names)
    def delete(self, name):
        model = self.live(name)
        call = self.registry("DeleteAdapter", name=self.prefix + name)
        if model is None:
            return self.refused(AdapterNotFound, call)
        answer = self.act(call)
        model.is_deleted = True
        return self.check(name, answer.adapter)

    @rule(name=names)
    def undelete(self, name):
        model = self.models.get(name)
        call = self.registry("UndeleteAdapter", name=self.prefix + name)
        if model is None or not model.is_deleted:
            return self.refused(AdapterNotFound if model is None else FailedPrecondition, call)
        answer = self.act(call)
        model.is_deleted = False
        return self.check(name, answer.adapter)

    @rule(
        name=names, default=st.sampled_from(["latest", *ALIASES]), label=st.sampled_from("xyz"), is_stale=st.booleans()
    )
    def update(self, name, default, label, is_stale):
        model = self.live(name)
        full = f"namespaces/default/adapters/{self.prefix}{name}"
        adapter = {"name": full, "default_alias": default, "labels": {"team": label}}
        adapter["etag"] = '"stale"' if is_stale else ""
        paths = {"paths": ["default_alias", "labels"]}
        call = self.registry("UpdateAdapter", adapter=adapter, update_mask=paths)
        if model is None:
            return self.refused(AdapterNotFound, call)
        if is_stale:
            return self.refused(EtagMismatch, call)
        if not (default == "latest" or default in model.aliases):
            return self.refused(InvalidArgument, call)
        answer = self.act(call)
        model.default, model.labels = default, {"team": label}
        return self.check(name, answer.adapter)

    # ---- what is seen

    @rule(name=names, suffix=st.none() | aliases | numbers | st.just("latest"))
    def resolve(self, name, suffix):
        model = self.live(name)
        reference = self.prefix + name + ("" if suffix is None else f"@{suffix}")
        call = self.registry.resolve(reference)
        if model is None:
            return self.refused(AdapterNotFound, call)
        if isinstance(suffix, int):
            wanted = {suffix: 1.0} if suffix in model.versions else {}
        else:
            wanted = model.targets(suffix or model.default)
        if not wanted:
            return self.refused(AdapterNotFound, call)
        found = self.act(call).targets
        assert {number(target.version): target.weight for target in found} == wanted
        assert all(t.version.digest == self.digests[model.versions[number(t.version)]] for t in found)
        return None

    @rule(label=st.sampled_from("xyz"), deleted=st.booleans())
    def list_adapters(self, label, deleted):
        text = f'name = "{self.prefix}*" AND labels.team = {label}'
        found = self.act(self.registry("ListAdapters", filter=text, show_deleted=deleted)).adapters
        assert [adapter.name.rpartition("-")[2] for adapter in found] == [
            name
            for name, model in sorted(self.models.items())
            if model.labels.get("team") == label and (deleted or not model.is_deleted)
        ]

    def teardown(self):
        """What the watch has told last is what there is."""
        if not hasattr(self, "watch"):
            return
        revision = self.act(self.registry.revision())
        self.act(self.told_up_to(revision))
        last = {change.adapter.name: change for change in self.watch.changes}
        for name, model in self.models.items():
            change = last[f"namespaces/default/adapters/{self.prefix}{name}"]
            assert (change.type == DELETE) == model.is_deleted
            self.check(name, change.adapter)
            shown = self.act(self.registry.adapter(self.prefix + name))
            assert shown == change.adapter
        assert self.watch.revisions == sorted(set(self.watch.revisions))
        self.loop.call_soon_threadsafe(self.watch.cancel)

    async def opened(self):
        """A watch, on the server's loop."""
        return await Watch(self.registry.stub, skip_snapshot=True).complete()

    async def told_up_to(self, revision):
        while self.watch.responses[-1].registry_revision < revision:
            await self.watch.next()

    # ---- tools

    def live(self, name):
        model = self.models.get(name)
        return None if model is None or model.is_deleted else model

    def check(self, name, adapter):
        model = self.models[name]
        assert adapter.HasField("delete_time") == model.is_deleted
        assert adapter.latest_version == max(model.versions, default=0)
        assert (adapter.default_alias, dict(adapter.labels)) == (model.default, model.labels)
        found = {a.name.rpartition("/")[2]: {t.version: t.weight for t in a.targets} for a in adapter.aliases}
        assert found == model.aliases

    def refused(self, error, call):
        with pytest.raises(LoraplexError) as caught:
            self.act(call)
        assert type(caught.value) is error, caught.value.summary


def uri(content):
    return f"file://main/c{content}"


def number(version):
    return int(version.name.rpartition("/")[2])


@pytest.fixture
def machine(database_url, folders):
    """The machine, and a server on a thread of its own: hypothesis is not asynchronous."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def act(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    async def serve():
        roots = {"main": str(folders.root)}
        server = await start(RegistryConfig(listen="127.0.0.1:0", database=database_url, file_roots=roots))
        return server, Caller(server.port)

    for content in CONTENTS:
        folders.write(f"c{content}", seed=content)
    server, registry = act(serve())
    try:
        act(registry("RegisterBaseModel", id="tiny", config_json=json.dumps(TINY)))
        digests = {c: act(registry.register("probe", uri(c), validate_only=True)).version.digest for c in CONTENTS}

        class Bound(Lives):
            pass

        Bound.act, Bound.registry, Bound.digests, Bound.loop = staticmethod(act), registry, digests, loop
        yield Bound
    finally:
        act(registry.close())
        act(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_lives_of_adapters(machine, database_url):
    runs, steps = EXAMPLES["sqlite" if database_url.startswith("sqlite") else "postgres"]
    chosen = settings(
        max_examples=runs, stateful_step_count=steps, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=chosen)
