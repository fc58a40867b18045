"""Settings that a child process would find wrong, found by the supervisor: one line, and nothing was started.

The children check again, for files may change until they read them.
"""

from inference_service.config import InferenceConfig, parse_size
from inference_service.engine.config import EngineConfig, limits_for
from inference_service.launch import BaseModel, registry_identity
from shared.base_model import parse_config
from shared.channel import check_identity
from shared.errors import FieldViolation, InvalidArgument
from shared.model_folder import load_raw_config

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_settings(config: InferenceConfig, base: BaseModel, engine: EngineConfig) -> None:
    """Files of who calls and of who we are, and sizes that do not go together.

    Raises:
        InvalidArgument: names the setting.
    """
    config.access().check_files()
    _check_registry_identity(config)
    _check_engine(config, base, engine)


def _check_registry_identity(config: InferenceConfig) -> None:
    """Its fields are settings that begin with `registry_`."""
    if bool(config.registry_cert) != bool(config.registry_key):
        missing = "registry_key" if config.registry_cert else "registry_cert"
        raise InvalidArgument.of(missing, "is missing: --registry-cert and --registry-key go together")
    try:
        check_identity(registry_identity(config))
    except InvalidArgument as error:
        named = [FieldViolation(f"registry_{each.field}", each.description) for each in error.violations]
        raise InvalidArgument(named) from None


def _check_engine(config: InferenceConfig, base: BaseModel, engine: EngineConfig) -> None:
    model = parse_config(load_raw_config(base.folder))
    limits_for(engine, base.device, model.max_position, model.max_position)
    if config.kv_cache_memory is None:
        return
    # As `engine.runner.kv_bytes_per_token`, which needs torch.
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * _DTYPE_BYTES[base.dtype]
    block_bytes = per_token * engine.block_size
    if parse_size(config.kv_cache_memory) < block_bytes:
        raise InvalidArgument.of(
            "kv_cache_memory",
            f"{config.kv_cache_memory} cannot hold one block of {engine.block_size} tokens, {block_bytes} bytes",
        )
