"""What whoever reads of a source that cannot be had may do about it; each follows a semicolon."""

ABSENT = "correct the URI, or restore what it names"
REPLACED = "restore what was registered, or register what is there now as a new version"
LOGIN = "give a credential that may read it"
FORBIDDEN_NAMES = "write the path without it"
PLAIN_FILES = "put the file itself there"
ALLOW_SOURCE = "name another source, or have its prefix added to the service's allowed_sources"
ALLOW_ENDPOINT = "name a public server by https, or have this one added to the service's allowed_endpoints"
READABLE = "give the user that the service runs as the right to read it"


def name_a_root(roots: list[str]) -> str:
    """For a `file://` URI of none of the roots."""
    if not roots:
        return "start the service with --file-root NAME=DIR, and write file://NAME/path"
    return f"write file://ROOT/path with one of the roots {', '.join(sorted(roots))}"
