"""Which revision a database's schema has, and whether this code knows it."""

from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection


class SchemaOutdated(Exception):
    """The database's schema is not the one that this code was written for."""


def known_revision(connection: Connection, script: ScriptDirectory) -> str | None:
    """The database's revision; None: it has no tables.

    Raises:
        SchemaOutdated: it is none of `script`'s, so a newer version has migrated the database.
    """
    found = MigrationContext.configure(connection).get_current_revision()
    if found is not None and found not in {each.revision for each in script.walk_revisions()}:
        raise SchemaOutdated(
            f"the database is newer than this registry: it is at revision {found}, and this version knows them up to "
            f"{script.get_current_head()}; run the version that migrated it, or go back to a backup from before "
            "(`loraplex registry restore` of this version, into an empty database)"
        )
    return found
