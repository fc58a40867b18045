"""One finished request, collected from its stream."""

from dataclasses import dataclass, field
from typing import Any

from loraplex import Client
from loraplex.inference.v1 import inference_pb2


@dataclass
class Collected:
    """What a stream said, by the events' meaning. One sequence only."""

    started: inference_pb2.Started | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: inference_pb2.Finished | None = None


async def collect(
    client: Client, prompt: Any, adapter: str = "", into: Collected | None = None, **arguments: Any
) -> Collected:
    """Runs one request to its end, greedy unless told otherwise, with token ids and logprobs.

    `into`: where it is collected, for who wants what came before an error.
    """
    arguments = {"temperature": 0, "output": {"token_ids": True, "logprobs": 0}, "timeout": 300, **arguments}
    result = into if into is not None else Collected()
    async for event in client.generate(prompt, adapter=adapter, **arguments):
        kind = event.WhichOneof("event")
        if kind == "started":
            result.started = event.started
        elif kind == "delta":
            result.text += event.delta.text
            result.token_ids += event.delta.token_ids
            result.logprobs += [t.logprob for t in event.delta.logprobs]
        elif kind == "finished":
            result.finished = event.finished
    return result


async def chat_ids(client: Client, prompt: str) -> list[int]:
    """Token ids of a chat prompt, as the server makes them."""
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content=prompt)])
    response = await client.call(client.inference.Tokenize(inference_pb2.TokenizeRequest(chat=chat)))
    return list(response.token_ids)
