"""The rows that a registration writes."""

import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from registry_service.models import READY, Adapter, AdapterVersion, BaseModel
from registry_service.validation import ValidatedAdapter


def new_adapter(
    namespace: str, name: str, base_model: str, labels: Mapping[str, str], description: str, now: datetime
) -> Adapter:
    """An adapter without versions."""
    return Adapter(
        uid=str(uuid.uuid4()),
        namespace=namespace,
        name=name,
        base_model=base_model,
        next_version=1,
        default_alias="latest",
        residency="ON_DEMAND",
        labels=dict(labels),
        annotations={},
        description=description,
        generation=1,
        create_time=now,
        update_time=now,
    )


def new_version(
    adapter: Adapter,
    number: int,
    base: BaseModel,
    checked: ValidatedAdapter,
    source: Mapping[str, str],
    creator: str,
    now: datetime,
) -> AdapterVersion:
    """A version with the content that was checked; `source` is {uri, credential_ref} as the caller gave it."""
    return AdapterVersion(
        uid=str(uuid.uuid4()),
        adapter_uid=adapter.uid,
        number=number,
        digest=checked.digest,
        source=dict(source),
        pinned_sources=[pinned_source(checked)],
        manifest=[{"path": file.path, "size_bytes": file.size, "sha256": file.sha256} for file in checked.files],
        lora_config=checked.lora.record(),
        warnings=list(checked.warnings),
        base_model_fingerprint=base.fingerprint,
        size_bytes=sum(file.size for file in checked.files),
        num_tensors=checked.num_tensors,
        state=READY,
        creator=creator,
        create_time=now,
    )


def pinned_source(checked: ValidatedAdapter) -> dict[str, Any]:
    """Where the checked bytes were read."""
    return {**checked.pinned._asdict(), "objects": [pinned._asdict() for pinned in checked.pinned.objects]}
