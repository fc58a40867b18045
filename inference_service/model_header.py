"""The header with which an inference gateway says which adapter a request is for, if the request itself names none."""

from typing import Any, Protocol

from shared.auth import caller_of
from shared.errors import InvalidArgument
from shared.references import parse_reference

MODEL_HEADER = "x-llm-d-model-name-rewrite"
OLD_MODEL_HEADER = "x-gateway-model-name-rewrite"  # its name in gateways of before; counts where the other is missing


class AdapterRequest(Protocol):
    """A request with a field `adapter`."""

    adapter: str


def name_adapter(request: AdapterRequest, context: Any, model_id: str) -> None:
    """Sets `request.adapter` to what the header names, which is authorized as if the request had named it.

    The header counts only where the request names no adapter and no blend, and its old name only where the present one
    is missing, as in the gateway. The base model's id, or its resource name, means the base model.

    Raises:
        InvalidArgument: the header is there more than once, or is no reference; names the header.
    """
    if request.adapter or getattr(request, "blend", None):
        return
    metadata = context.invocation_metadata() or ()
    for header in (MODEL_HEADER, OLD_MODEL_HEADER):
        if names := [str(value) for key, value in metadata if key == header]:
            break
    else:
        return
    if len(names) > 1:
        raise InvalidArgument.of(header, f"names {len(names)} adapters; a request is for one")
    (name,) = names
    if name not in (model_id, f"baseModels/{model_id}"):
        parse_reference(name, caller_of(context).namespace, header)
        request.adapter = name  # as the gateway says it, which also looks for this name in the metrics
