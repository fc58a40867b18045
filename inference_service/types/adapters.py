"""API process → adapter process."""

from typing import Literal, NamedTuple

import msgspec

from inference_service.stats import Tier
from shared.digest import FileEntry


class PreparedAdapter(msgspec.Struct, frozen=True):
    """A resolved adapter whose verified files are on this machine. `version` is the full resource name.

    `tier`: where the adapter was when it was asked for. `texts`: the tokenizer and chat-template files that it brings
    (`ReadTexts`). `extra_vocab`: token ids beyond the base model's. `activation`: the tokens from whose last occurrence
    in the prompt on it acts; empty: everywhere. `parts`: what a blend consists of; it has no version of its own.
    """

    version: str
    digest: str
    rank: int
    size_bytes: int
    tier: Tier = "host"
    texts: tuple[FileEntry, ...] = ()
    extra_vocab: int = 0
    activation: tuple[int, ...] = ()
    parts: "tuple[BlendedPart, ...]" = ()


class BlendedPart(msgspec.Struct, frozen=True):
    """One adapter of a blend, as it was resolved. `version` is the full resource name."""

    version: str
    digest: str
    weight: float


class StagedAdapter(msgspec.Struct, frozen=True):
    """An adapter in the disk or host tier. `size_bytes`: of the files, or of the blob when in host memory.

    KNOWN: in neither, but resolved here before, so that it has a name.
    """

    version: str
    digest: str
    level: Literal["DISK", "HOST", "KNOWN"]
    rank: int
    size_bytes: int


class Prepare(msgspec.Struct, tag=True, frozen=True):
    """Resolve a reference and stage its files. `reference` is canonical (`shared.references`).

    `traceparent`: W3C context of the request that it is for, if that is traced.
    """

    call_id: int
    reference: str
    choice_key: str = ""
    traceparent: str = ""


class BlendPart(NamedTuple):
    """A canonical reference and how much of it."""

    reference: str
    weight: float


class PrepareBlend(msgspec.Struct, tag=True, frozen=True):
    """Resolve the parts and stage their weighted sum as an adapter of its own. Answered as `Prepare`."""

    call_id: int
    parts: tuple[BlendPart, ...]
    choice_key: str = ""
    traceparent: str = ""


class AwaitResidency(msgspec.Struct, tag=True, frozen=True):
    """Answered when the adapters that the registry wants here are here, at the latest after `seconds`."""

    call_id: int
    seconds: float


class ReadTexts(msgspec.Struct, tag=True, frozen=True):
    """The content of an adapter's `PreparedAdapter.texts`, verified; answered by `Reply.texts`."""

    call_id: int
    digest: str


class Resolve(msgspec.Struct, tag=True, frozen=True):
    """The digest that a canonical reference means, with nothing fetched."""

    call_id: int
    reference: str


class DropStaged(msgspec.Struct, tag=True, frozen=True):
    """Forget an adapter's blob in host memory (its files stay on disk); answered with the bytes that this frees."""

    call_id: int
    digest: str


class ListStaged(msgspec.Struct, tag=True, frozen=True):
    """What the disk and host tiers hold, and the names of `digests` that they do not hold.

    `names_only`: nothing but what is known of `digests`.
    """

    call_id: int
    digests: tuple[str, ...] = ()
    names_only: bool = False
