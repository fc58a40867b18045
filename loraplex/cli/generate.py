"""`loraplex generate`: one streamed answer."""

import json as jsonlib
from collections import defaultdict
from typing import Annotated, Any

import typer

from loraplex.cli.calls import run
from loraplex.cli.names import qualified
from loraplex.cli.options import (
    DEFAULT_SERVER,
    MAX_INT32,
    MAX_INT64,
    AdapterOption,
    Json,
    ServerAddress,
    Timeout,
)
from loraplex.cli.output import as_dict
from loraplex.client import Client, Prompt


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    adapter: AdapterOption = "",
    blend: Annotated[
        list[str], typer.Option(help="REFERENCE=WEIGHT of an adapter in a blend, instead of --adapter; repeatable.")
    ] = [],  # noqa: B006
    max_tokens: Annotated[
        int | None,
        typer.Option(min=0, max=MAX_INT32, help="Tokens, at most what the context leaves; all of that if unset."),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Only the likeliest tokens of this joint probability.")] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, max=MAX_INT32, help="Only the likeliest K tokens; 0 is off.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=-MAX_INT64 - 1, max=MAX_INT64, help="Equal seeds give equal answers.")
    ] = None,
    n: Annotated[int, typer.Option(min=1, max=MAX_INT32, help="Number of answers.")] = 1,
    stop: Annotated[list[str], typer.Option(help="Stop string; repeatable.")] = [],  # noqa: B006
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message, with --chat.")] = None,
    timeout: Timeout = None,
    json: Json = False,
    server: ServerAddress = DEFAULT_SERVER,
) -> None:
    """Generate with the base model or an adapter. The answer streams; with --json: one event a line."""
    if system is not None and not chat:
        raise typer.BadParameter("a system message needs --chat", param_hint="--system")
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed, "n": n}
    stops: dict[str, Any] = {"strings": stop}
    if max_tokens is not None:
        stops["max_tokens"] = max_tokens
    arguments: dict[str, Any] = {
        "prompt": _messages(prompt, system) if chat else prompt,
        "adapter": qualified(adapter),
        "timeout": timeout,
        "stop": stops,
        "request": {"blend": [_blend_part(part) for part in blend]},
        **{k: v for k, v in sampling.items() if v is not None},
    }
    print_events = _print_json if json else _print_text
    run(lambda client: print_events(client, arguments), server=server, timeout=timeout)


def _blend_part(text: str) -> dict[str, Any]:
    reference, _, weight = text.rpartition("=")
    try:
        return {"reference": qualified(reference), "weight": float(weight)}
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not REFERENCE=WEIGHT", param_hint="--blend") from None


def _messages(prompt: str, system: str | None) -> Prompt:
    messages = [{"role": "user", "content": prompt}]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


async def _print_json(client: Client, arguments: dict[str, Any]) -> None:
    async for event in client.generate(**arguments):
        typer.echo(jsonlib.dumps(as_dict(event), ensure_ascii=False))


async def _print_text(client: Client, arguments: dict[str, Any]) -> None:
    """Streams the first answer; the others follow whole, since they come interleaved. Several have headings."""
    others: dict[int, list[str]] = defaultdict(list)
    has_text = False
    try:
        async for event in client.generate(**arguments):
            if event.HasField("started") and arguments["n"] > 1:
                typer.echo(_heading(0))
            if event.HasField("delta") and event.delta.index == 0:
                has_text = True
                typer.echo(event.delta.text, nl=False)
            elif event.HasField("delta"):
                others[event.delta.index].append(event.delta.text)
    except BaseException:
        if has_text:
            typer.echo()  # the message comes on a line of its own
        raise
    typer.echo()
    for index in range(1, arguments["n"]):
        typer.echo(f"{_heading(index)}\n{''.join(others[index])}")


def _heading(index: int) -> str:
    return f"--- answer {index + 1}"
