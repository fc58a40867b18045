"""Run by alembic, on the connection that `registry_service.migrations` gives it."""

from alembic import context

from registry_service.models import Table

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Table.metadata,
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
