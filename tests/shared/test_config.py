from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from shared.config import ConfigError, is_address, load, options


@dataclass(frozen=True)
class Settings:
    listen: str = field(default="127.0.0.1:1", metadata={"help": "Where to listen."})
    workers: int = field(default=2, metadata={"help": "How many.", "check": lambda n: None if n > 0 else "at least 1"})
    grace: float = 5.0
    verbose: bool = False
    folder: Path = Path("var")
    names: tuple[str, ...] = ()
    file_roots: dict[str, str] = field(default_factory=dict, metadata={"flag": "--file-root", "help": "NAME=DIR"})
    device: Literal["cpu", "cuda"] = "cpu"
    model: str | None = None
    limit: int | None = None


def read(tmp_path, toml="", env=None, flags=None):
    path = tmp_path / "settings.toml"
    path.write_text(toml)
    return load(Settings, toml=path, env=env or {}, prefix="LORAPLEX_TEST_", flags=flags or {})


def test_defaults_without_any_source():
    assert load(Settings, toml=None, env={}, prefix="LORAPLEX_TEST_", flags={}) == Settings()


def test_flags_win_over_environment_over_toml(tmp_path):
    settings = read(
        tmp_path,
        'listen = "toml"\nworkers = 3\ngrace = 1\n',
        {"LORAPLEX_TEST_WORKERS": "4", "LORAPLEX_TEST_GRACE": "2.5", "OTHER": "x"},
        {"grace": 7.0, "model": None},
    )
    assert (settings.listen, settings.workers, settings.grace) == ("toml", 4, 7.0)


def test_every_type_from_toml(tmp_path):
    toml = """
    verbose = true
    folder = "/data"
    names = ["a", "b"]
    device = "cuda"
    model = "m"
    limit = 3
    file_roots = {adapters = "/srv/a", more = "/srv/b"}
    """
    assert read(tmp_path, toml) == Settings(
        verbose=True,
        folder=Path("/data"),
        names=("a", "b"),
        device="cuda",
        model="m",
        limit=3,
        file_roots={"adapters": "/srv/a", "more": "/srv/b"},
    )


def test_a_key_may_be_called_as_its_flag_is(tmp_path):
    assert read(tmp_path, '[file_root]\na = "/srv"').file_roots == {"a": "/srv"}
    assert read(tmp_path, "", {"LORAPLEX_TEST_FILE_ROOT": "a=/srv"}).file_roots == {"a": "/srv"}
    with pytest.raises(ConfigError, match=r"file_roots .*is the same setting as file_root"):
        read(tmp_path, '[file_root]\na = "/srv"\n[file_roots]\nb = "/srv"')


def test_every_type_from_strings(tmp_path):
    env = {
        "LORAPLEX_TEST_VERBOSE": "Yes",
        "LORAPLEX_TEST_FOLDER": "/data",
        "LORAPLEX_TEST_NAMES": "a, b",
        "LORAPLEX_TEST_FILE_ROOTS": "adapters=/srv/a=1,more=/srv/b",
        "LORAPLEX_TEST_LIMIT": "9",
    }
    settings = read(tmp_path, "", env, {"device": "cuda", "names": ["c"]})
    assert settings.verbose
    assert settings.folder == Path("/data")
    assert settings.names == ("c",)
    assert settings.file_roots == {"adapters": "/srv/a=1", "more": "/srv/b"}
    assert settings.limit == 9
    assert settings.device == "cuda"
    assert read(tmp_path, "", {}, {"file_roots": ["x=/y"]}).file_roots == {"x": "/y"}


def test_all_wrong_keys_and_values_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as caught:
        read(
            tmp_path,
            'wrokers = 3\nworkers = "3"\nverbose = 1\n',
            {"LORAPLEX_TEST_GRACE": "nan", "LORAPLEX_TEST_NOSUCH": "1"},
            {"device": "tpu", "file_roots": ["novalue"], "workers": 0},
        )
    found = {(problem.key, problem.expected.split(",")[0].split(";")[0]) for problem in caught.value.problems}
    assert found == {
        ("wrokers", "no such setting"),
        ("workers", "expected an integer"),
        ("verbose", "expected true or false"),
        ("LORAPLEX_TEST_GRACE", "expected a number"),
        ("LORAPLEX_TEST_NOSUCH", "no such setting"),
        ("--device", "expected one of cpu"),
        ("--file-root", "expected NAME=VALUE"),
        ("--workers", "expected at least 1"),
    }
    assert {problem.origin for problem in caught.value.problems} == {
        str(tmp_path / "settings.toml"),
        "environment",
        "flag",
    }
    assert "workers (" in str(caught.value)


def test_service_links_of_kubernetes_are_no_settings(tmp_path):
    env = {
        "LORAPLEX_TEST_PORT": "tcp://10.0.0.1:50051",
        "LORAPLEX_TEST_SERVICE_HOST": "10.0.0.1",
        "LORAPLEX_TEST_SERVICE_PORT_GRPC": "50051",
        "LORAPLEX_TEST_PORT_50051_TCP_ADDR": "10.0.0.1",
    }
    assert read(tmp_path, "", env) == Settings()


@pytest.mark.parametrize("content", ["workers = ", b"\xff\xfe"])
def test_a_file_that_is_no_toml(tmp_path, content):
    path = tmp_path / "settings.toml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="is not TOML"):
        load(Settings, toml=path, env={}, prefix="X_", flags={})


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load(Settings, toml=tmp_path / "none.toml", env={}, prefix="X_", flags={})


def test_a_setting_without_default_must_be_given():
    @dataclass(frozen=True)
    class Needy:
        model: str

    with pytest.raises(ConfigError) as caught:
        load(Needy, toml=None, env={"X_NOSUCH": "1"}, prefix="X_", flags={})
    assert (
        str(caught.value)
        == "X_NOSUCH (environment): no such setting; there are model; --model (not given): is required"
    )
    assert load(Needy, toml=None, env={"X_MODEL": "m"}, prefix="X_", flags={}) == Needy("m")


def test_options_describe_a_command_line():
    by_name = {option.name: option for option in options(Settings)}
    assert by_name["listen"].help == "Where to listen."
    assert by_name["listen"].flag == "--listen"
    assert by_name["file_roots"].flag == "--file-root"
    assert by_name["file_roots"].mapping
    assert by_name["file_roots"].default == {}
    assert by_name["device"].choices == ("cpu", "cuda")
    assert by_name["limit"].kind is int
    assert by_name["names"].repeated


@pytest.mark.parametrize("text", ["127.0.0.1:0", "localhost:65535", "[::]:50051", "unix:/run/x.sock"])
def test_addresses(text):
    assert is_address(text) is None


@pytest.mark.parametrize("text", ["", "nowhere", ":1", "host:", "host:x", "host:-1", "host:65536"])
def test_what_is_no_address(text):
    assert is_address(text) == "HOST:PORT"


@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1e400", "1" + "0" * 400])
def test_a_number_is_finite_wherever_it_is_given(tmp_path, number):
    for given in (
        {"toml": f"grace = {number}\n"},
        {"env": {"LORAPLEX_TEST_GRACE": number}},
        {"flags": {"grace": number}},
    ):
        with pytest.raises(ConfigError, match="expected a number, is "):
            read(tmp_path, **given)
