"""`loraplex generate`: one streamed answer."""

import json as jsonlib
from typing import Annotated, Any

import typer

from loraplex.cli.options import DEFAULT_SERVER, Json, ServerAddress, as_dict, run
from loraplex.client import Client, Prompt


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    adapter: Annotated[str, typer.Option(help="Adapter reference; none is the base model.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="Tokens at most; to the end of the context if unset.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal answers.")] = None,
    n: Annotated[int | None, typer.Option(help="Number of answers.")] = None,
    stop: Annotated[list[str], typer.Option(help="Stop string; repeatable.")] = [],  # noqa: B006
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    system: Annotated[str, typer.Option(help="System message, with --chat.")] = "",
    timeout: Annotated[float | None, typer.Option(help="Seconds until the request is given up.")] = None,
    json: Json = False,
    server: ServerAddress = DEFAULT_SERVER,
) -> None:
    """Generate with the base model or an adapter; the answer streams. With --json: one event a line."""
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed, "n": n}
    stops: dict[str, Any] = {"strings": stop}
    if max_tokens is not None:
        stops["max_tokens"] = max_tokens
    arguments: dict[str, Any] = {
        "prompt": _messages(prompt, system) if chat else prompt,
        "adapter": adapter,
        "timeout": timeout,
        "stop": stops,
        **{k: v for k, v in sampling.items() if v is not None},
    }
    run(lambda client: _stream(client, arguments, json), server=server)


def _messages(prompt: str, system: str) -> Prompt:
    messages = [{"role": "user", "content": prompt}]
    return [{"role": "system", "content": system}, *messages] if system else messages


async def _stream(client: Client, arguments: dict[str, Any], json: bool) -> None:
    others: dict[int, list[str]] = {}
    async for event in client.generate(**arguments):
        if json:
            typer.echo(jsonlib.dumps(as_dict(event), ensure_ascii=False))
        elif event.HasField("delta") and event.delta.index == 0:
            typer.echo(event.delta.text, nl=False)
        elif event.HasField("delta"):
            others.setdefault(event.delta.index, []).append(event.delta.text)
    if not json:
        typer.echo()
    for index, parts in sorted(others.items()):
        typer.echo(f"--- answer {index + 1}\n{''.join(parts)}")
