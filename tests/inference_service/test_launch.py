"""From flags, variables and files to the start lines of the processes."""

import json
import logging
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from inference_service import __main__ as command
from inference_service.adapters.config import AdapterProcessStart
from inference_service.config import ENV_PREFIX, ApiStart, InferenceConfig, parse_size
from inference_service.engine.config import EngineConfig
from inference_service.launch import child_specs, find_base_model
from inference_service.machine_checks import kernel_cache
from shared.base_model import parse_config, tensor_shapes
from shared.config import ConfigError, load, options
from shared.errors import InvalidArgument
from shared.flags import flag_parser
from tests.inference_service.serving_fakes import raw_config


@pytest.fixture(autouse=True)
def _logging_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    monkeypatch.setattr(root, "level", root.level)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "Tiny-Model"
    folder.mkdir()
    raw = raw_config()
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = {name: np.ones(shape, np.float32) for name, shape in tensor_shapes(parse_config(raw)).items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("1048576", 1 << 20), ("256MiB", 256 << 20), ("1.5Gi", 3 << 29), ("2GB", 2 * 10**9), ("1 kb", 1000)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "-1", "1XB", "GiB", "1e9", "nan", "9" * 400, "2000000TiB"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_flags_are_the_fields() -> None:
    arguments = ["--model", "m", "--file-root", "a=/x", "--file-root", "b=/y", "--no-prefix-caching", "--threads", "2"]
    flags = vars(flag_parser(InferenceConfig, "serve", "").parse_args(arguments))
    toml = flags.pop("config")
    config = load(
        InferenceConfig, toml=toml, env={"LORAPLEX_INFERENCE_MAX_QUEUE": "7"}, prefix="LORAPLEX_INFERENCE_", flags=flags
    )
    assert (config.model, config.file_roots, config.threads) == ("m", {"a": "/x", "b": "/y"}, 2)
    assert (config.prefix_caching, config.max_queue, config.listen) == (False, 7, "127.0.0.1:50052")


def test_neither_supervisor_nor_api_process_loads_torch() -> None:
    code = "import sys, inference_service.__main__, inference_service.server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_lists_every_flag(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(["--help"])
    assert caught.value.code == 0
    text = capfd.readouterr().out
    assert all(flag in text for flag in ("--model", "--file-root", "--kv-cache-memory", "(required)", "[1GiB]"))


def test_everything_wrong_is_told_at_once() -> None:
    flags = {"model": "m", "host_memory": "much", "listen": "nowhere", "max_queue": "0", "device": "tpu"}
    with pytest.raises(ConfigError) as caught:
        load(InferenceConfig, toml=None, env={}, prefix="X_", flags=flags)
    assert len(caught.value.problems) == 4


def test_start_lines(folder: Path) -> None:
    config = InferenceConfig(
        model=str(folder),
        device="cpu",
        api_processes=2,
        file_roots={"a": "/x"},
        adapter_memory="1MiB",
        cache_dir=Path("/c"),
        otlp_endpoint="http://collector:4317",
        log_requests=False,
        log_prompts=True,
    )
    base = find_base_model(config)
    assert (base.model_id, base.dtype, base.folder) == ("tiny-model", "float32", folder)
    adapters, engine, first, second = child_specs(config, base, Path("/run/x"), 9)
    start = msgspec.json.decode(adapters.start, type=AdapterProcessStart)
    assert (start.host_arena_fd, start.address, start.wait_for_engine) == (9, "ipc:///run/x/adapters.sock", False)
    assert (start.config.base_model, start.config.dtype, start.config.disk_bytes) == ("tiny-model", "float32", 20 << 30)
    assert start.config.device_bytes == 1 << 20
    assert msgspec.json.decode(adapters.restart, type=AdapterProcessStart).wait_for_engine
    line = json.loads(engine.start)
    assert (line["api_address"], line["adapter_address"]) == ("ipc:///run/x/engine.sock", start.address)
    settings = msgspec.convert(line["config"], EngineConfig)
    assert (settings.adapter_memory_bytes, settings.kv_cache_bytes, settings.device) == (1 << 20, None, "cpu")
    assert settings.weights_fingerprint == base.weights_fingerprint
    api = msgspec.json.decode(first.start, type=ApiStart)
    assert (api.reuse_port, api.model_id, api.listen) == (True, "tiny-model", "127.0.0.1:50052")
    assert (api.log_requests, api.log_prompts) == (False, True)
    assert api.otlp_endpoint == start.config.otlp_endpoint == "http://collector:4317"
    assert first == second
    assert (first.stage, engine.stage, adapters.stage) == (0, 1, 2)
    assert (first.hears_events, engine.hears_events) == (True, False)
    assert adapters.pass_fds == engine.pass_fds == (9,)


def test_random_weights_need_no_checkpoint(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    one, other = (
        InferenceConfig(model=str(folder), device="cpu", load_format="dummy", dummy_seed=seed) for seed in (1, 2)
    )
    base = find_base_model(one)
    assert base.weights_fingerprint != find_base_model(other).weights_fingerprint
    adapters, engine, *_ = child_specs(one, base, Path("/run/x"), 9)
    settings = msgspec.convert(json.loads(engine.start)["config"], EngineConfig)
    assert (settings.load_format, settings.seed) == ("dummy", 1)
    start = msgspec.json.decode(adapters.start, type=AdapterProcessStart)
    assert start.config.weights_fingerprint == settings.weights_fingerprint == base.weights_fingerprint
    with pytest.raises(InvalidArgument, match=r"model\.safetensors"):
        find_base_model(InferenceConfig(model=str(folder), device="cpu"))


def test_variables_that_processes_read_before_they_can_be_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    config = InferenceConfig(model=str(folder), device="cpu", cache_dir=Path("/c"))
    specs = child_specs(config, find_base_model(config), Path("/run/x"), 9)
    of_engine = {"TRITON_CACHE_DIR": "/c/kernels", "MALLOC_TRIM_THRESHOLD_": "131072"}
    of_adapters = {"GRPC_VERBOSITY": "NONE"}
    of_api = {**of_adapters, "GRPC_ENABLE_FORK_SUPPORT": "0"}
    assert [dict(spec.environment) for spec in specs] == [of_adapters, of_engine, of_api]
    monkeypatch.setenv("GRPC_VERBOSITY", "INFO")
    adapters, _, api = child_specs(config, find_base_model(config), Path("/run/x"), 9)
    assert adapters.environment["GRPC_VERBOSITY"] == api.environment["GRPC_VERBOSITY"] == "INFO"
    assert kernel_cache(InferenceConfig(model="m", kernel_cache_dir=Path("/k"))) == Path("/k")


def test_half_precision_is_for_gpus(folder: Path) -> None:
    on_gpu = InferenceConfig(model=str(folder), device="cuda")
    assert find_base_model(on_gpu).dtype == "bfloat16"
    assert find_base_model(InferenceConfig(model=str(folder), device="cuda", dtype="float32")).dtype == "float32"


@pytest.fixture(autouse=True)
def _any_port_of_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{ENV_PREFIX}METRICS_LISTEN", "127.0.0.1:0")  # the usual one may be taken


def error_of(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command.main(arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    return line


def test_what_prevents_a_start_is_one_line(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{ENV_PREFIX}LISTEN", "127.0.0.1:0")  # the usual port may be taken
    assert error_of(capfd) == "error: --model (not given): is required"
    assert "neither a folder nor a Hub id" in error_of(capfd, "--model", "/no/such")
    assert "error: --host-memory: " in error_of(capfd, "--model", str(folder), "--host-memory", "999999TiB")
    assert "error: --host-memory (flag): " in error_of(capfd, "--model", str(folder), "--host-memory", "0")
    assert "port 0" in error_of(capfd, "--model", str(folder), "--api-processes", "2", "--listen", "127.0.0.1:0")
    assert "error: --model-name: " in error_of(capfd, "--model", str(folder), "--model-name", "A b")
    (folder / "config.json").write_text(json.dumps(raw_config(architectures=["GPTNeoForCausalLM"])))
    assert "GPTNeoForCausalLM" in error_of(capfd, "--model", str(folder))
    (folder / "config.json").write_text(json.dumps(raw_config()))
    (folder / "model.safetensors").unlink()
    assert "model.safetensors" in error_of(capfd, "--model", str(folder))


def test_a_taken_port_is_told_before_anything_is_loaded(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        for more in ((), ("--api-processes", "2")):
            line = error_of(capfd, "--model", str(folder), "--listen", listen, *more)
            assert line == f"error: --listen: cannot listen on {listen}: address already in use"


def test_an_engine_setting_that_is_wrong_is_named(folder: Path) -> None:
    config = InferenceConfig(model=str(folder), device="cpu", max_adapters=0)
    with pytest.raises(InvalidArgument, match="max_adapters"):
        child_specs(config, find_base_model(config), Path("/run/x"), 9)


@pytest.mark.parametrize(
    ("flag", "most"),
    [
        ("--threads", 1024),
        ("--api-processes", 256),
        ("--max-adapters", 65536),
        ("--max-num-seqs", 65536),
        ("--max-batched-tokens", 1 << 20),
    ],
)
def test_numbers_that_no_machine_has_are_refused_with_the_range(
    folder: Path, capfd: pytest.CaptureFixture[str], flag: str, most: int
) -> None:
    for number in (0, most + 1, 100_000_000, 9 * 10**30):
        told = error_of(capfd, "--model", str(folder), "--listen", "127.0.0.1:0", flag, str(number))
        assert told == f"error: {flag} (flag): expected 1 to {most}, is {number}"
    name = flag.strip("-").replace("-", "_")
    assert (
        getattr(load(InferenceConfig, toml=None, env={}, prefix="", flags={"model": "m", name: str(most)}), name)
        == most
    )


def test_every_number_has_both_ends() -> None:
    """No integer reaches a library that would fail at it, and no time a clock."""
    for option in options(InferenceConfig):
        if option.kind in (int, float) and not option.is_table:
            for number in (-(1 << 70), 1 << 70):
                with pytest.raises(ConfigError, match=rf"{option.flag} \(flag\): expected .*\d.*, is "):
                    load(InferenceConfig, toml=None, env={}, prefix="", flags={"model": "m", option.name: str(number)})


def test_what_the_machine_lacks_is_told_before_anything_starts(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ("--model", str(folder), "--device", "cpu", "--listen", "127.0.0.1:0", "--cache-dir", str(tmp_path / "c"))
    (tmp_path / "file").touch()
    for more, told in [
        (("--file-root", "main=/nope"), "--file-root: no such folder: main=/nope"),
        (("--cache-dir", str(tmp_path / "file")), f"--cache-dir: {tmp_path / 'file'} cannot be used"),
        (("--cache-dir", str(tmp_path / "file" / "x")), f"--cache-dir: {tmp_path / 'file' / 'x'} cannot be used"),
        (("--host-memory", "500TB"), "--host-memory: 500TB cannot be had"),
        (("--adapter-memory", "500TB"), "--adapter-memory: 500TB cannot be had"),
        (("--kv-cache-memory", "500TB"), "--kv-cache-memory: 500TB cannot be had"),
        (("--adapter-memory", "1"), "--adapter-memory (flag): expected a size such as 256MiB, of 1MiB or more"),
        (
            ("--disk-bytes", "100PiB"),
            "--disk-bytes (flag): expected a size such as 256MiB, of 1MiB or more (bytes, or with kB, MB, GB, TB, KiB, "
            "MiB, GiB, TiB), is '100PiB'",
        ),
        (("--disk-bytes", "10KB"), "--disk-bytes (flag): expected a size such as 256MiB, of 1MiB or more"),
        (("--registry", "not an address"), "--registry (flag): expected HOST:PORT"),
        (("--adapter-memory", "10TiB"), "--adapter-memory: 10TiB cannot be had: the system has "),
        (("--kv-cache-memory", "15TiB"), "--kv-cache-memory: 15TiB cannot be had: the system has "),
    ]:
        assert error_of(capfd, *model, *more).startswith(f"error: {told}")
    monkeypatch.setattr("inference_service.machine_checks.cuda_memory", lambda: 0)
    assert error_of(capfd, *model, "--device", "cuda") == (
        "error: --device: this machine has no GPU that PyTorch can use"
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--registry-cert", "/no"), "--registry-key: is missing: --registry-cert and --registry-key go together"),
        (("--registry-key", "/no"), "--registry-cert: is missing: --registry-cert and --registry-key go together"),
        (("--registry-cert", "/no", "--registry-key", "/no"), "--registry-cert: /no cannot be read: No such file"),
        (("--registry-ca", "/no"), "--registry-ca: /no cannot be read: No such file or directory"),
        (("--registry-ca", "TEXT"), "--registry-ca: TEXT: there is no PEM certificate"),
        (("--registry-token-file", "/no"), "--registry-token-file: /no cannot be read: No such file or directory"),
        (("--registry-token-file", "TEXT"), "--registry-token-file: TEXT must hold one token"),
        (("--tls-cert", "/no"), "--tls-key: is required for TLS"),
        (("--tls-client-ca", "/no"), "--tls-cert: is required for TLS"),
        (("--tls-cert", "TEXT", "--tls-key", "/no"), "--tls-key: /no cannot be read: No such file or directory"),
        (("--tls-cert", "TEXT", "--tls-key", "TEXT"), "--tls-cert: TEXT, TEXT: there is no PEM certificate"),
        (("--auth-token-file", "/no"), "--auth-token-file: /no cannot be read: No such file or directory"),
        (("--auth-jwks-file", "/no"), "--auth-jwt-issuer: is required with auth_jwks_file"),
        (("--kv-cache-memory", "100B"), "--kv-cache-memory: 100B cannot hold one block of 16 tokens, 512 bytes"),
        (
            ("--max-num-seqs", "9", "--max-batched-tokens", "8"),
            "--max-batched-tokens: must be at least max_num_seqs (9)",
        ),
    ],
)
def test_files_and_sizes_that_cannot_be_are_told_in_one_line(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: tuple[str, ...], told: str
) -> None:
    text = str(tmp_path / "text")
    Path(text).write_text("two words")
    model = ("--model", str(folder), "--device", "cpu", "--listen", "127.0.0.1:0", "--cache-dir", str(tmp_path / "c"))
    error = error_of(capfd, *model, *(text if flag == "TEXT" else flag for flag in flags))
    assert error.startswith(f"error: {told.replace('TEXT', text)}")


def test_what_only_a_child_finds_wrong_ends_the_replica_likewise(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ("--model", str(folder), "--device", "cpu", "--listen", "127.0.0.1:0", "--cache-dir", str(tmp_path / "c"))
    monkeypatch.setattr(command, "check_settings", lambda *_: None)  # what it sees may change until a child looks
    assert command.main([*model, "--kv-cache-memory", "100B", "--metrics-listen", "127.0.0.1:0"]) == 2
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors == [
        "error: the engine process ended with exit code 2: INVALID_ARGUMENT: kv_cache_memory: is 100 bytes; "
        "one block of tokens takes 512"
    ]


def test_a_taken_port_is_told_in_one_line_before_anything_is_made(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = ("--model", str(folder), "--listen", "127.0.0.1:0", "--cache-dir", str(tmp_path / "c"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flag in ("--listen", "--health-listen", "--metrics-listen"):
            told = error_of(capfd, *model, flag, address)
            assert told == f"error: {flag}: cannot listen on {address}: address already in use"
    assert not (tmp_path / "c").exists()
    several = ("--api-processes", "2", "--listen", "unix:/any", "--health-listen", "127.0.0.1:0")
    assert "--health-listen: port 0 needs --api-processes 1" in error_of(capfd, *model[:2], *several)
