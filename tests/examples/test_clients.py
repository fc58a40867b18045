"""The example clients, against running services; the one in Go against the protos, for no Go is needed to test here."""

import asyncio
import base64
import json
import os
import re
import stat
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from google.rpc import error_details_pb2

from examples.stack import INFERENCE_SERVICE, ROOT, Stack, free_address, register, wait_for_base_model
from loraplex.inference.v1 import inference_pb2

CLIENTS = ROOT / "examples" / "clients"
BUF = Path(sys.executable).parent / "buf"
PLUGIN = """#!{python}
import sys
from google.protobuf.compiler import plugin_pb2
request = plugin_pb2.CodeGeneratorRequest.FromString(sys.stdin.buffer.read())
answer = plugin_pb2.CodeGeneratorResponse(supported_features=1)
for file in request.proto_file:
    if file.name in request.file_to_generate:
        answer.file.add(name=file.name + ".package.{name}", content=file.options.go_package)
sys.stdout.buffer.write(answer.SerializeToString())
"""
GO_TYPES = {"double": "float64", "int32": "int32"}


class Services:
    """Both, with the adapter `pirate`, and where the metrics are."""

    def __init__(self, stack: Stack, metrics: str) -> None:
        self.inference, self.registry, self.metrics = stack.inference.address, stack.registry.address, metrics


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    metrics = free_address()
    stack = Stack(tmp_path_factory.mktemp("clients"), flags=[f"--metrics-listen={metrics}"])
    async with stack, stack.client() as client:
        await wait_for_base_model(client)
        await register(client, "pirate", "file://examples/pirate")
        yield Services(stack, metrics)


async def run(*command: str, **environment: str) -> str:
    """What a command prints; it must succeed."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env={**os.environ, **environment}, stdout=pipe, stderr=pipe
    )
    async with asyncio.timeout(120):
        out, errors = await process.communicate()
    assert process.returncode == 0, (out + errors).decode()
    return out.decode()


def documents(text: str) -> list[dict[str, object]]:
    """JSON objects one after the other."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while match := re.compile(r"\s*(?=\{)").match(text, at):
        value, at = decoder.raw_decode(text, match.end())
        found.append(value)
    return found


@pytest.mark.model
@pytest.mark.asyncio(loop_scope="module")
async def test_buf_curl_by_reflection(services: Services) -> None:
    script = str(CLIENTS / "reflection.sh")
    said = (await run(script, services.inference, services.registry, BUF=str(BUF))).split("> ")[1:]
    (registry_is,), (inference_is,), (registered,), events = (documents(part.split("\n", 1)[1]) for part in said)
    assert registry_is == inference_is == {"status": "SERVING"}
    assert registered["version"]["name"] == "namespaces/default/adapters/curled/versions/1"
    assert events[0]["started"]["adapterDigest"] == registered["version"]["digest"]
    answer = "".join(event.get("delta", {}).get("text", "") for event in events)
    assert answer.startswith('{"answer": "Paris"')
    assert events[-1]["finished"]["finishReason"].startswith("FINISH_REASON_")


@pytest.mark.model
@pytest.mark.asyncio(loop_scope="module")
async def test_what_the_page_says_to_paste(services: Services) -> None:
    """Its first block, with the addresses of these services."""
    section = (ROOT / "docs" / "clients.md").read_text().partition("## From a shell")[2]
    block = section.split("```")[1]
    for pasted, here in (("localhost:50051", services.registry), ("localhost:50052", services.inference)):
        assert pasted in block
        block = block.replace(pasted, here)
    block = block.replace(".venv/bin/buf", str(BUF))
    said = documents(await run("bash", "-ec", f"shopt -s expand_aliases\n{block}"))
    assert said[0] == {"status": "SERVING"}
    assert said[1]["version"]["name"] == "namespaces/default/adapters/mine/versions/1"
    assert said[2]["started"]["adapterVersion"] == said[1]["version"]["name"]
    assert said[-1]["finished"]["usage"] == {"promptTokens": 5, "completionTokens": 8}


@pytest.mark.model
@pytest.mark.asyncio(loop_scope="module")
async def test_buf_curl_names_the_reason_of_an_error(services: Services) -> None:
    request = json.dumps({"adapter": "nobody", "text": "x"})
    url = f"http://{services.inference}/{INFERENCE_SERVICE}/Generate"
    curl = [str(BUF), "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--data", request, url]
    process = await asyncio.create_subprocess_exec(*curl, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert process.returncode
    said = json.loads(errors)
    assert said["code"] == "not_found"
    (info,) = [d["value"] for d in said["details"] if d["type"] == "google.rpc.ErrorInfo"]
    assert error_details_pb2.ErrorInfo.FromString(base64.b64decode(info + "==")).reason == "ADAPTER_NOT_FOUND"


@pytest.mark.model
@pytest.mark.asyncio(loop_scope="module")
async def test_generated_stubs_alone(services: Services) -> None:
    said = await run(sys.executable, "-m", "examples.clients.stubs", services.inference, services.registry)
    assert "namespaces/default/adapters/pirate\n" in said
    assert re.search(r"^namespaces/default/adapters/pirate/versions/1: \S.* \(24 tokens\)$", said, re.MULTILINE)
    assert "NOT_FOUND, ADAPTER_NOT_FOUND: there is no adapter namespaces/default/adapters/nobody" in said
    imported = re.findall(r"^(?:import|from) (\w+)", (CLIENTS / "stubs.py").read_text(), re.MULTILINE)
    assert set(imported) == {"asyncio", "sys", "grpc", "google", "grpc_status", "loraplex"}
    assert "loraplex import" not in (CLIENTS / "stubs.py").read_text(), "not our own client"


@pytest.mark.model
@pytest.mark.asyncio(loop_scope="module")
async def test_curl_reads_metrics(services: Services) -> None:
    said = await run(str(CLIENTS / "metrics.sh"), services.metrics)
    for name in ("vllm:num_requests_running", "vllm:lora_requests_info", "loraplex_up"):
        assert re.search(rf"^{name}(\{{| )", said, re.MULTILINE), name


async def test_buf_gives_go_the_package_that_the_client_imports(tmp_path: Path) -> None:
    for name in ("protoc-gen-go", "protoc-gen-go-grpc"):
        plugin = tmp_path / name
        plugin.write_text(PLUGIN.format(python=sys.executable, name=name))
        plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    template = str(CLIENTS / "go" / "buf.gen.yaml")
    protos = str(ROOT / "protos")
    path = f"{tmp_path}:{os.environ['PATH']}"
    await run(str(BUF), "generate", protos, "--template", template, "--output", str(tmp_path), PATH=path)
    packages = {file.read_text().partition(";")[0] for file in (tmp_path / "gen").rglob("*.package.*")}
    (imported,) = re.findall(r'pb "([^"]+)"', (CLIENTS / "go" / "main.go").read_text())
    assert imported in packages


def test_the_client_in_go_uses_what_the_protos_have() -> None:
    text = (CLIENTS / "go" / "main.go").read_text()
    file = inference_pb2.DESCRIPTOR
    messages = file.message_types_by_name
    fields = {_camel(f.name): f for message in messages.values() for f in message.fields}
    oneofs = {_camel(oneof.name) for message in messages.values() for oneof in message.oneofs}
    wrappers = {f"{m}_{_camel(f.name)}" for m in messages for f in messages[m].fields if f.containing_oneof}
    known = {*messages, *wrappers, *(f"New{name}Client" for name in file.services_by_name)}
    assert set(re.findall(r"\bpb\.(\w+)", text)) <= known
    request = text[text.index("&pb.GenerateRequest{") : text.index("for err == nil")]
    assert set(re.findall(r"\b([A-Z]\w*): ", request)) <= {*fields, *oneofs}
    assert set(re.findall(r"\.Get(\w+)\(", text)) <= set(fields)
    for name, variable in (("Temperature", "temperature"), ("MaxTokens", "maxTokens")):
        kind = {1: "double", 5: "int32"}[fields[name].type]
        assert fields[name].has_presence
        assert f"{name}: &{variable}" in text
        assert f"{GO_TYPES[kind]}(" in text
    (service,) = re.findall(r'"serviceName": "([^"]+)"', text)
    assert service == INFERENCE_SERVICE
    assert '_ "google.golang.org/grpc/health"' in text, "or nobody asks for health"


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
