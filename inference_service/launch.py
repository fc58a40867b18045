"""From the settings to the processes of one replica. What is wrong with the model is found here, before any starts."""

import re
import socket
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import msgspec

from inference_service.adapters.config import AdapterProcessConfig, AdapterProcessStart
from inference_service.child import ChildSpec
from inference_service.config import ApiStart, InferenceConfig, parse_size
from inference_service.engine.config import EngineConfig
from inference_service.machine_checks import cuda_memory, has_gpu, kernel_cache
from inference_service.run_folder import LONGEST_SOCKET
from shared.base_model import default_id, parse_config
from shared.base_weights import dummy_fingerprint, fingerprint_with_weights
from shared.channel import ClientIdentity
from shared.errors import InvalidArgument
from shared.grpc_environment import grpc_environment
from shared.model_folder import load_raw_config, resolve_model
from shared.references import check_id

Dtype = Literal["float32", "bfloat16", "float16"]

_STOP_SECONDS = 10.0
# glibc raises its threshold for blocks that go back to the system to the largest that was freed, and the engine's
# tensors, of a new size each step, then leave a heap that grows by gigabytes. A threshold that was set stays.
_ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(128 << 10)}


class BaseModel(NamedTuple):
    """The base model of this replica, and where and as what it runs."""

    folder: Path
    model_id: str
    weights_fingerprint: str
    device: Literal["cpu", "cuda"]
    dtype: Dtype


def find_base_model(config: InferenceConfig) -> BaseModel:
    """Resolve the model and settle every `auto`.

    Raises:
        InvalidArgument: the model cannot be served: names the key, tensor or architecture.
        LoraplexError: it must be downloaded, and cannot be (`shared.model_download`).
    """
    is_dummy = config.load_format == "dummy"
    folder = resolve_model(config.model, with_weights=not is_dummy)
    is_folder = Path(config.model).expanduser().is_dir()
    model_id = check_id(config.model_name or default_id(str(folder) if is_folder else config.model), "model_name")
    raw = load_raw_config(folder)
    checkpoint_dtype = parse_config(raw).dtype
    device = config.device if config.device != "auto" else "cuda" if has_gpu() and cuda_memory() else "cpu"
    weights = dummy_fingerprint(raw, config.dummy_seed) if is_dummy else fingerprint_with_weights(raw, folder)
    return BaseModel(folder, model_id, weights, device, _dtype(config, device, checkpoint_dtype))


def _dtype(config: InferenceConfig, device: str, checkpoint_dtype: str) -> Dtype:
    """float32 on a CPU, which computes it fastest; on a GPU half precision, as in the checkpoint."""
    if config.dtype != "auto":
        return config.dtype
    if device == "cpu":
        return "float32"
    return "float16" if checkpoint_dtype == "float16" else "bfloat16"


def addresses(folder: Path) -> tuple[str, str]:
    """Where the engine and the adapter process answer, for ZeroMQ."""
    return f"ipc://{folder}/engine.sock", f"ipc://{folder}/{LONGEST_SOCKET}"


def child_specs(config: InferenceConfig, base: BaseModel, folder: Path, host_arena_fd: int) -> list[ChildSpec]:
    """The adapter process, the engine process and the API processes, with their sockets in `folder`.

    Stages: who is asked ends after who asks.
    """
    api_address, adapter_address = addresses(folder)
    adapters = AdapterProcessStart(
        config=_adapter_config(config, base),
        address=adapter_address,
        host_arena_fd=host_arena_fd,
        engine_address=api_address,
    )
    engine = {
        "config": engine_config(config, base),
        "api_address": api_address,
        "adapter_address": adapter_address,
        "host_arena_fd": host_arena_fd,
        "log_level": config.log_level,
    }
    api = _api_start(config, base, api_address, adapter_address)
    # A new adapter process waits for the engine, which may still read the arena that it would write.
    again = msgspec.structs.replace(adapters, wait_for_engine=True)
    api_grace = config.drain_grace + _STOP_SECONDS
    return [
        _spec(
            "adapters",
            "inference_service.adapters.process",
            adapters,
            again,
            stage=2,
            fds=(host_arena_fd,),
            environment=grpc_environment(),
        ),
        _spec(
            "engine",
            "inference_service.engine.process",
            engine,
            engine,
            fds=(host_arena_fd,),
            environment={"TRITON_CACHE_DIR": str(kernel_cache(config)), **_ALLOCATOR},  # read when triton is imported
        ),
        *(
            _spec(
                "api",
                "inference_service.server",
                api,
                api,
                stage=0,
                grace=api_grace,
                hears_events=True,
                environment=grpc_environment(starts_processes=True),  # text workers
            )
            for _ in range(config.api_processes)
        ),
    ]


def _spec(
    role: str,
    module: str,
    start: msgspec.Struct | Mapping[str, Any],
    restart: msgspec.Struct | Mapping[str, Any],
    *,
    stage: int = 1,
    grace: float = _STOP_SECONDS,
    fds: tuple[int, ...] = (),
    hears_events: bool = False,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> ChildSpec:
    argv = (sys.executable, "-m", module)
    lines = (msgspec.json.encode(start), msgspec.json.encode(restart))
    return ChildSpec(
        role,
        argv,
        *lines,
        stage=stage,
        grace=grace,
        pass_fds=fds,
        hears_events=hears_events,
        environment=environment,
    )


def _api_start(config: InferenceConfig, base: BaseModel, api_address: str, adapter_address: str) -> ApiStart:
    return ApiStart(
        listen=config.listen,
        reuse_port=config.api_processes > 1,
        model_folder=str(base.folder),
        model_id=base.model_id,
        api_address=api_address,
        adapter_address=adapter_address,
        drain_grace=config.drain_grace,
        access=config.access(),
        limits=config.limits(),
        max_unread=config.max_unread,
        tenant_tokens_per_second=config.tenant_tokens_per_second,
        namespaces=config.namespaces,
        residency_wait=config.residency_wait,
        log_level=config.log_level,
        log_requests=config.log_requests,
        log_prompts=config.log_prompts,
        otlp_endpoint=config.otlp_endpoint,
    )


def registry_identity(config: InferenceConfig) -> ClientIdentity:
    """How this replica shows the registry who it is."""
    return ClientIdentity(
        token_file=config.registry_token_file,
        ca=config.registry_ca,
        cert=config.registry_cert,
        key=config.registry_key,
    )


def _adapter_config(config: InferenceConfig, base: BaseModel) -> AdapterProcessConfig:
    return AdapterProcessConfig(
        registry=config.registry,
        registry_identity=registry_identity(config),
        base_model=base.model_id,
        model_folder=str(base.folder),
        weights_fingerprint=base.weights_fingerprint,
        has_weights=config.load_format != "dummy",
        dtype=base.dtype,
        cache_dir=str(config.cache_dir.expanduser().absolute()),
        disk_bytes=parse_size(config.disk_bytes),
        device_bytes=_size(config.adapter_memory) or 0,
        file_roots={name: str(Path(root).expanduser().absolute()) for name, root in config.file_roots.items()},
        credentials=config.credentials,
        allowed_sources=config.allowed_sources,
        allowed_endpoints=config.allowed_endpoints,
        max_stale=config.max_stale,
        replica=config.replica_name or _replica_name(config),
        log_level=config.log_level,
        otlp_endpoint=config.otlp_endpoint,
    )


def _replica_name(config: InferenceConfig) -> str:
    """HOST:PORT where it listens; with a random mark instead of a port that is any."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64].strip(".-") or "replica"
    port = config.listen.rpartition(":")[2]
    return f"{host}:{port if port.isdigit() and int(port) else uuid.uuid4().hex[:8]}"


def engine_config(config: InferenceConfig, base: BaseModel) -> EngineConfig:
    """The engine's settings. Raises InvalidArgument, which names the setting."""
    try:
        return EngineConfig(
            model=str(base.folder),
            weights_fingerprint=base.weights_fingerprint,
            load_format=config.load_format,
            seed=config.dummy_seed,
            device=base.device,
            dtype=base.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_batched_tokens=config.max_batched_tokens,
            memory_fraction=config.memory_fraction,
            kv_cache_bytes=_size(config.kv_cache_memory),
            adapter_memory_bytes=_size(config.adapter_memory),
            max_adapters=config.max_adapters,
            threads=config.threads,
            prefix_caching=config.prefix_caching,
            max_queue=config.max_queue,
            max_queued_per_tenant=config.max_queued_per_tenant,
            max_running_per_tenant=config.max_running_per_tenant,
            adapter_bytes_per_tenant=_size(config.adapter_memory_per_tenant) or 0,
            adapter_age_limit=config.adapter_age_limit,
        )
    except ValueError as error:
        raise InvalidArgument.of(str(error).split()[0], str(error)) from error


def _size(text: str | None) -> int | None:
    return None if text is None else parse_size(text)
