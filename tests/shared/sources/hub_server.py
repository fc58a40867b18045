"""A small Hub: the API's and the file server's answers as huggingface.co gives them, with files in git or in a store.

Large files redirect to the store, another origin, by a URL that is signed and shows no Authorization header may follow.
"""

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LFS_BYTES = 1024  # files at least this large lie in the store
TOKEN = "hf_goodtoken"


@dataclass
class Repo:
    """`commits`: files by commit; `refs`: commits by branch or tag."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    is_private: bool = False
    is_gated: bool = False
    is_disabled: bool = False

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """A new commit that `ref` points at."""
        sha = hashlib.sha1(repr((sorted(files.items()), len(self.commits))).encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.refs[ref] = sha
        return sha


class HubServer:
    """The API under `url`, the store on another port. `api_calls` and `store_headers` are what came in."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.api_calls: list[str] = []
        self.store_headers: list[dict[str, str]] = []
        self.moved: dict[str, str] = {}
        self._store = _serve(self, _Store)
        self._hub = _serve(self, _Hub)
        self.store_url = f"http://localhost:{self._store.server_address[1]}"
        self.url = f"http://127.0.0.1:{self._hub.server_address[1]}"

    def close(self) -> None:
        for server in (self._hub, self._store):
            server.shutdown()
            server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status: int, code: str, message: str) -> None:
        self.answer(status, json.dumps({"error": message}).encode(), X_Error_Code=code, X_Error_Message=message)

    def send_file(self, content: bytes, **headers: str) -> None:
        size = len(content)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match is None:
            return self.answer(200, content, Accept_Ranges="bytes", **headers)
        start, end = int(match[1]), min(int(match[2] or size - 1) + 1, size)
        if start >= size:
            return self.answer(416, Content_Range=f"bytes */{size}", **headers)
        return self.answer(206, content[start:end], Content_Range=f"bytes {start}-{end - 1}/{size}", **headers)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Hub(_Handler):
    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            self.hub.api_calls.append(self.path)
            if match[1] in self.hub.moved:
                return self.answer(307, Location=path.replace(match[1], self.hub.moved[match[1]]))
            return self._info(match[1], unquote(match[2] or "main"))
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            return self._tree(match[1], match[2])
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(match[1], unquote(match[2]), unquote(match[3]))
        return self.error(404, "EntryNotFound", "Not Found")

    def _repo(self, name: str) -> Repo | None:
        """The repository, if the caller may know of it; else the answer is sent."""
        authorization = self.headers.get("Authorization")
        if authorization not in (None, f"Bearer {TOKEN}"):
            self.answer(401, b"{}", X_Error_Message="Invalid credentials in Authorization header")
            return None
        repo = self.hub.repos.get(name)
        if repo is None or (repo.is_private and authorization is None):
            if authorization is None:  # whether it exists is nobody's business
                self.answer(401, b"{}", X_Error_Message="Invalid username or password.")
            else:
                self.error(404, "RepoNotFound", "Repository not found")
            return None
        if repo.is_disabled:
            self.answer(403, b"{}", X_Error_Message="Access to this resource is disabled.")
            return None
        return repo

    def _info(self, name: str, revision: str) -> None:
        if (repo := self._repo(name)) is None:
            return None
        sha = repo.refs.get(revision, revision)
        if sha not in repo.commits:
            return self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        siblings = [{"rfilename": path} for path in repo.commits[sha]]
        gated = "manual" if repo.is_gated else False
        info = {"_id": "1", "id": name, "sha": sha, "private": repo.is_private, "gated": gated, "siblings": siblings}
        return self.answer(200, json.dumps(info).encode(), Content_Type="application/json")

    def _tree(self, name: str, sha: str) -> None:
        if (repo := self._repo(name)) is None:
            return None
        entries = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in repo.commits[sha].items()
        ]
        return self.answer(200, json.dumps(entries).encode(), Content_Type="application/json")

    def _resolve(self, name: str, revision: str, path: str) -> None:
        if (repo := self._repo(name)) is None:
            return None
        if repo.is_gated and "Authorization" not in self.headers:
            return self.error(401, "GatedRepo", "Access to model is restricted and you are not in the authorized list.")
        sha = repo.refs.get(revision, revision)
        if sha not in repo.commits:
            return self.error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if (content := repo.commits[sha].get(path)) is None:
            return self.error(404, "EntryNotFound", "Entry not found")
        sha256 = hashlib.sha256(content).hexdigest()
        if len(content) < LFS_BYTES:
            return self.send_file(content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=sha)
        return self.answer(
            302,
            X_Repo_Commit=sha,
            X_Linked_Size=str(len(content)),
            X_Linked_ETag=f'"{sha256}"',
            Location=f"{self.hub.store_url}/{sha256}?at={name}/{sha}/{path}&Signature=SECRETSIGNATURE",
        )


class _Store(_Handler):
    def do_GET(self) -> None:
        self.hub.store_headers.append({k.lower(): v for k, v in self.headers.items()})
        if "Authorization" in self.headers:
            return self.answer(400)
        at = parse_qs(urlsplit(self.path).query)["at"][0].split("/", 3)
        content = self.hub.repos["/".join(at[:2])].commits[at[2]][at[3]]
        return self.send_file(content, ETag='"of-the-store"')


def _serve(hub: HubServer, handler: type[_Handler]) -> ThreadingHTTPServer:
    bound = type(handler.__name__, (handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), bound)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server
