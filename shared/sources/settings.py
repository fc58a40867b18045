"""What the settings about sources say of themselves in both services: `metadata` of `shared.config` fields."""

from shared.sources.credentials import is_endpoint
from shared.sources.policy import split_rule


def _are_rules(rules: tuple[str, ...]) -> str | None:
    return None if all("://" in split_rule(rule)[1] for rule in rules) else "[NAMESPACE=]PREFIX, such as a=s3://bucket/"


def _are_endpoints(endpoints: tuple[str, ...]) -> str | None:
    return next((expected for url in endpoints if (expected := is_endpoint(url)) is not None), None)


CREDENTIALS = {"help": "tables [credentials.NAME]: what sources are read with, and by whom"}
ALLOWED_SOURCES = {
    "flag": "--allow-source",
    "help": "[NAMESPACE=]PREFIX of the URIs that a namespace, or each, may read; repeatable; without any, all",
    "check": _are_rules,
}
ALLOWED_ENDPOINTS = {
    "flag": "--allow-endpoint",
    "help": "URL of a server that plugins may reach though it is private or speaks plain HTTP; repeatable",
    "check": _are_endpoints,
}
