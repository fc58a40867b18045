"""`loraplex base-model`: register, list."""

from pathlib import Path
from typing import Annotated

import typer

from loraplex.cli.options import DEFAULT_REGISTRY, Json, RegistryAddress, print_json, print_table, run
from loraplex.client import Client
from loraplex.registry.v1 import registry_pb2, resources_pb2
from shared.base_model import default_id

app = typer.Typer(help="Manage base models.", no_args_is_help=True)


@app.command()
def register(
    folder: Annotated[Path, typer.Argument(help="Folder that holds the model's config.json.")],
    id: Annotated[str, typer.Option(help="Id; the folder's name by default.")] = "",
    json: Json = False,
    registry: RegistryAddress = DEFAULT_REGISTRY,
) -> None:
    """Make a base model known, before any replica serves it."""
    config = folder / "config.json"
    if not config.is_file():
        raise typer.BadParameter(f"{config} is not a file", param_hint="FOLDER")
    request = registry_pb2.RegisterBaseModelRequest(id=id or default_id(str(folder)), config_json=config.read_text())
    response = run(lambda c: c.call(c.registry.RegisterBaseModel(request)), registry=registry)
    if json:
        return print_json(response.base_model)
    verb = "registered" if response.created else "already registered"
    return typer.echo(f"{verb}: {response.base_model.name} {response.base_model.architecture}")


@app.command("list")
def list_base_models(json: Json = False, registry: RegistryAddress = DEFAULT_REGISTRY) -> None:
    """List base models."""
    models = run(_all, registry=registry)
    if json:
        return print_json(models)
    return print_table(
        ("BASE MODEL", "ARCHITECTURE", "MODULES", "FINGERPRINT"),
        ((m.name.removeprefix("baseModels/"), m.architecture, m.num_modules, m.fingerprint[:19]) for m in models),
    )


async def _all(client: Client) -> list[resources_pb2.BaseModel]:
    models: list[resources_pb2.BaseModel] = []
    token = ""
    while True:
        request = registry_pb2.ListBaseModelsRequest(page_size=200, page_token=token)
        page = await client.call(client.registry.ListBaseModels(request))
        models += page.base_models
        token = page.next_page_token
        if not token:
            return models
