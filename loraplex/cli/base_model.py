"""`loraplex base-model`: register, list."""

from pathlib import Path
from typing import Annotated

import typer

from loraplex.cli.calls import run
from loraplex.cli.options import DEFAULT_REGISTRY, Json, RegistryAddress
from loraplex.cli.output import print_json, print_table, short_digest
from loraplex.client import Client
from loraplex.registry.v1 import registry_pb2, resources_pb2
from shared.base_model import default_id

app = typer.Typer(help="Manage base models.")


@app.command()
def register(
    folder: Annotated[Path, typer.Argument(help="Folder that holds the model's config.json.")],
    id: Annotated[str, typer.Option(help="Id; the folder's name by default.")] = "",
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Make a base model known, before any replica serves it."""
    config_json = _config_json(folder)  # first: a folder that cannot be read may have no real path either
    request = registry_pb2.RegisterBaseModelRequest(id=id or default_id(str(folder.resolve())), config_json=config_json)
    response = run(lambda c: c.call(c.registry.RegisterBaseModel(request)), registry=registry)
    if json:
        return print_json(response.base_model)
    verb = "registered" if response.created else "already registered"
    return typer.echo(f"{verb}: {response.base_model.name} {response.base_model.architecture}")


def _config_json(folder: Path) -> str:
    config = folder / "config.json"
    try:
        return config.read_text(encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{config} cannot be read: {error.strerror}", param_hint="FOLDER") from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{config} is not UTF-8 text", param_hint="FOLDER") from None


@app.command("list")
def list_base_models(json: Json = False, registry: RegistryAddress = DEFAULT_REGISTRY) -> None:
    """List base models."""
    request = registry_pb2.ListBaseModelsRequest()

    async def all_models(client: Client) -> list[resources_pb2.BaseModel]:
        return [m async for page in client.pages(client.registry.ListBaseModels, request) for m in page.base_models]

    models = run(all_models, registry=registry)
    if json:
        return print_json(models)
    return print_table(
        ("BASE MODEL", "ARCHITECTURE", "MODULES", "FINGERPRINT"),
        (
            (m.name.removeprefix("baseModels/"), m.architecture, m.num_modules, short_digest(m.fingerprint))
            for m in models
        ),
    )
