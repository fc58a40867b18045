"""Errors about one part of a blend say which."""

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from shared.errors import BaseModelConflict, Draining, InvalidArgument, LoraplexError, RegistryUnavailable, from_record

_OF_ALL = (BaseModelConflict, RegistryUnavailable, Draining)  # no part is to blame


@contextmanager
def of_part(field: str) -> Iterator[None]:
    """What is raised inside names `field`, such as `blend[0]`, in its message and metadata; empty: it is no part.

    Raises a copy: one error may be told to several requests.
    """
    try:
        yield
    except InvalidArgument:
        raise  # names its field itself
    except LoraplexError as error:
        if not field or isinstance(error, _OF_ALL) or error.metadata.get("field") == field:
            raise
        record = error.record()
        named = msgspec.structs.replace(
            record, message=f"{field}: {record.message}", metadata={**record.metadata, "field": field}
        )
        raise from_record(named) from error
