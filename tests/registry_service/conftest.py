"""A real registry on a real socket, on SQLite and on a real Postgres, and adapters made up for it."""

import json
import shutil
import uuid
from pathlib import Path

import grpc
import numpy as np
import psycopg
import pytest
from safetensors.numpy import save

from loraplex.registry.v1 import registry_pb2, registry_pb2_grpc, resources_pb2
from registry_service import migrations, service, watch
from registry_service.config import RegistryConfig
from registry_service.models import Table
from registry_service.server import start
from shared.base_model import linear_shapes, parse_config
from shared.errors import LoraplexError
from shared.status import from_rpc_error
from tests.registry_service.embedded_postgres import embedded_postgres

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


# ---- Postgres


@pytest.fixture(scope="session")
def postgres():
    """Connection string of a server on a Unix socket, without a database name."""
    with embedded_postgres("fsync=off", "full_page_writes=off", "autovacuum=off", "max_connections=60") as server:
        yield server.url


@pytest.fixture(scope="session")
def migrated_postgres(postgres):
    """One migrated database; whoever uses it empties it first, which is faster than to make another."""
    with psycopg.connect(postgres.format("postgres"), autocommit=True) as connection:
        connection.execute("CREATE DATABASE migrated")
    migrations.upgrade(postgres.format("migrated"))
    return postgres.format("migrated")


def _empty(url):
    with psycopg.connect(url) as connection:
        connection.execute("SET session_replication_role = replica")  # no trigger forbids it
        for table in reversed(Table.metadata.sorted_tables):
            if table.name == "registry_state":
                connection.execute("UPDATE registry_state SET revision = 0, compacted_revision = 0")
            else:
                connection.execute(f"DELETE FROM {table.name}")


@pytest.fixture
def make_postgres(postgres):
    """Makes databases without tables."""
    names = []

    def make():
        names.append("t" + uuid.uuid4().hex)
        with psycopg.connect(postgres.format("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {names[-1]}")
        return postgres.format(names[-1])

    yield make
    with psycopg.connect(postgres.format("postgres"), autocommit=True) as connection:
        for name in names:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory):
    """A migrated file that nobody opens: copies of it cost less than migrations."""
    path = tmp_path_factory.mktemp("migrated") / "registry.db"
    migrations.upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request, tmp_path):
    if request.param == "sqlite":
        shutil.copyfile(request.getfixturevalue("migrated_sqlite"), tmp_path / "registry.db")
        return f"sqlite:///{tmp_path}/registry.db"
    url = request.getfixturevalue("migrated_postgres")
    _empty(url)
    return url


@pytest.fixture(params=["sqlite", "postgres"])
def empty_database_url(request, tmp_path):
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/registry.db"
    return request.getfixturevalue("make_postgres")()


# ---- adapters


class AdapterFolders:
    """Writes adapters for the tiny base model below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model = parse_config(TINY)

    def tensors(self, seed=0, rank=2, modules=("q_proj", "v_proj"), dtype=np.float32):
        random = np.random.default_rng(seed)
        found = {}
        for path, (rows, columns) in linear_shapes(self.model).items():
            if path.endswith(modules):
                name = f"base_model.model.{path}"
                found[f"{name}.lora_A.weight"] = random.normal(size=(rank, columns)).astype(dtype)
                found[f"{name}.lora_B.weight"] = random.normal(size=(rows, rank)).astype(dtype)
        return found

    def write(self, name="a", seed=0, config=None, tensors=None, **changes):
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        tensors = tensors or self.tensors(seed, **changes)
        full = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], **(config or {})}
        (folder / "adapter_config.json").write_text(json.dumps(full))
        (folder / "adapter_model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
        return f"file://main/{name}"


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "adapters").mkdir()
    return AdapterFolders(tmp_path / "adapters")


# ---- the service and its caller


@pytest.fixture(autouse=True)
def _a_revision_is_waited_for(monkeypatch):
    """However busy this machine is: the log's reader runs in this process as well."""
    monkeypatch.setattr(service, "MIN_REVISION_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(watch, "CATCH_UP_SECONDS", 60.0)


def bare(adapter):
    """What changes answer with: without what only GetAdapter and ListAdapters tell."""
    for field in ("serving", "default_version", "num_versions"):
        adapter.ClearField(field)
    return adapter


class Caller:
    """Calls the registry; a failed call raises the error of shared.errors that the service raised."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.stub = registry_pb2_grpc.AdapterRegistryServiceStub(self._channel)

    async def __call__(self, rpc, **fields):
        rpc = getattr(self.stub, rpc)
        request = getattr(registry_pb2, f"{rpc._method.decode().rpartition('/')[2]}Request")(**fields)
        try:
            return await rpc(request)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def register(self, adapter_id="a", uri="file://main/a", base_model="tiny", **fields):
        source = resources_pb2.AdapterSource(uri=uri)
        return await self("RegisterAdapter", adapter_id=adapter_id, source=source, base_model=base_model, **fields)

    async def resolve(self, reference, **fields):
        return await self("ResolveAdapter", reference=reference, **fields)

    async def adapter(self, name):
        """The adapter as changes answer with it: without what only GetAdapter and ListAdapters tell."""
        return bare(await self("GetAdapter", name=name))

    async def revision(self):
        """The registry's revision: telling it what it knows changes nothing."""
        return (await self("RegisterBaseModel", id="tiny", config_json=json.dumps(TINY))).registry_revision

    async def refused(self, error, rpc, **fields):
        """The error of a call that must fail with this class."""
        with pytest.raises(LoraplexError) as caught:
            await self(rpc, **fields)
        assert type(caught.value) is error, caught.value.message
        return caught.value

    async def close(self) -> None:
        await self._channel.close()


@pytest.fixture
def config(database_url, folders):
    return RegistryConfig(
        listen="127.0.0.1:0", database=database_url, file_roots={"main": str(folders.root)}, max_adapter_bytes=1 << 20
    )


@pytest.fixture
async def running(config):
    server = await start(config)
    yield server
    await server.stop()


@pytest.fixture
async def registry(running):
    """A caller of a registry that knows the base model `tiny`."""
    caller = Caller(running.port)
    await caller("RegisterBaseModel", id="tiny", config_json=json.dumps(TINY))
    yield caller
    await caller.close()


@pytest.fixture
def connect():
    """Callers of other ports."""
    return Caller


@pytest.fixture
def tiny():
    return dict(TINY)
