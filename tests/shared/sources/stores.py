"""A Hub, an S3 and a web server with one face, each behind a proxy that goes wrong when it is told to."""

import datetime
import ipaddress
import ssl
import threading
import uuid
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from examples.resolver_plugin.loraplex_https import HttpsSource
from shared.sources.credentials import Credential
from shared.sources.policy import Patience, SourcePolicy
from shared.sources.resolver import PinnedSource, Source, open_source
from tests.shared.sources.fault_proxy import Fault, FaultProxy
from tests.shared.sources.hub_server import HubServer, Repo

IMPATIENT = Patience(read=1.0, attempts=3, first_delay=0.01, longest_delay=0.2, least_rate=10_000, pace=1.0)
SECRET = "SECRETSECRETSECRET"


class Store:
    """Folders of files under URIs. Faults happen to the bytes of files."""

    policy: SourcePolicy
    proxy: FaultProxy  # before the server that is asked first

    def put(self, name: str, files: dict[str, bytes]) -> str:
        """Create or replace a folder; its URI."""
        raise NotImplementedError

    def remove(self, name: str) -> None:
        raise NotImplementedError

    def fault(self, fault: Fault) -> None:
        raise NotImplementedError

    def pinned(self, uri: str) -> PinnedSource:
        return PinnedSource(uri, credential_ref="test")

    def open(
        self, source: PinnedSource, namespace: str = "default", policy: Any = None, stopping: Any = None
    ) -> Source:
        return open_source(source, namespace, policy or self.policy, stopping or threading.Event())

    def sent(self) -> int:
        """Bytes of files that were sent."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class HubStore(Store):
    """Weights lie in the Hub's store."""

    def __init__(self) -> None:
        self.hub = HubServer()
        self.proxy = FaultProxy(self.hub.url)
        self.store = FaultProxy(self.hub.store_url)
        self.hub.store_url = self.store.url.replace("127.0.0.1", "localhost")
        credential = Credential("hf", "none", ("*",), ("hf://",), endpoint=self.proxy.url)
        self.policy = SourcePolicy({}, {"test": credential}, patience=IMPATIENT)

    def put(self, name: str, files: dict[str, bytes]) -> str:
        repo = self.hub.repos.setdefault(f"org/{name}", Repo())
        repo.commit(files)
        return f"hf://org/{name}"

    def replace_in_place(self, name: str, files: dict[str, bytes]) -> None:
        """What a hostile Hub could do."""
        repo = self.hub.repos[f"org/{name}"]
        repo.commits = dict.fromkeys(repo.commits, files)

    def remove(self, name: str) -> None:
        self.hub.repos.pop(f"org/{name}")

    def fault(self, fault: Fault) -> None:
        if fault.status:
            self.proxy.faults.append(fault._replace(path=f"resolve.*{fault.path}"))
        else:
            self.store.faults.append(fault)

    def sent(self) -> int:
        return sum(seen.sent[0] for seen in self.store.seen)

    def close(self) -> None:
        for server in (self.proxy, self.store, self.hub):
            server.close()


class S3Store(Store):
    """A new bucket of the server at `url`."""

    def __init__(self, url: str, *, has_versions: bool = False) -> None:
        self.url = url
        self.bucket = f"bucket-{uuid.uuid4().hex}"
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        self.client = boto3.client("s3", endpoint_url=url, **keys)
        self.client.create_bucket(Bucket=self.bucket)
        if has_versions:
            status = {"Status": "Enabled"}
            self.client.put_bucket_versioning(Bucket=self.bucket, VersioningConfiguration=status)
        self.proxy = FaultProxy(url)
        credential = Credential(
            "s3", f"value:{SECRET}", ("*",), ("s3://",), self.proxy.url, "us-east-1", key_id="value:AKIATEST"
        )
        self.policy = SourcePolicy({}, {"test": credential}, patience=IMPATIENT)

    def put(self, name: str, files: dict[str, bytes]) -> str:
        for path, content in files.items():
            self.client.put_object(Bucket=self.bucket, Key=f"adapters/{name}/{path}", Body=content)
        return f"s3://{self.bucket}/adapters/{name}"

    def remove(self, name: str) -> None:
        for entry in self.client.list_objects_v2(Bucket=self.bucket, Prefix=f"adapters/{name}/")["Contents"]:
            self.client.delete_object(Bucket=self.bucket, Key=entry["Key"])

    def fault(self, fault: Fault) -> None:
        self.proxy.faults.append(fault._replace(path=f"{self.bucket}/.*{fault.path}"))

    def sent(self) -> int:
        return sum(seen.sent[0] for seen in self.proxy.seen if "list-type" not in seen.path)

    def close(self) -> None:
        self.proxy.close()
        self.client.close()


class WebStore(Store):
    """A folder behind a web server that knows ranges and ETags, behind the proxy that speaks TLS."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "www"
        self.folder.mkdir()
        handler = partial(_WebHandler, directory=str(self.folder))
        self.web = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.web.daemon_threads = True
        threading.Thread(target=self.web.serve_forever, args=(0.05,), daemon=True).start()
        self.certificate = folder / "ca.pem"
        self.proxy = FaultProxy(f"http://127.0.0.1:{self.web.server_address[1]}", tls(self.certificate))
        credential = Credential("https", f"value:{SECRET}", ("*",), ("https://",), endpoint=self.proxy.url)
        self.policy = SourcePolicy({}, {"test": credential}, patience=IMPATIENT)

    def put(self, name: str, files: dict[str, bytes]) -> str:
        for path, content in files.items():
            (self.folder / name / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name / path).write_bytes(content)
        return f"{self.proxy.url}/{name}/"

    def remove(self, name: str) -> None:
        (self.folder / name).rename(self.folder / "removed")

    def fault(self, fault: Fault) -> None:
        self.proxy.faults.append(fault)

    def open(
        self, source: PinnedSource, namespace: str = "default", policy: Any = None, stopping: Any = None
    ) -> Source:
        policy = policy or self.policy
        credential = policy.check(source.uri, source.credential_ref, namespace)
        return HttpsSource(source, policy.access(credential, namespace, stopping or threading.Event()))

    def sent(self) -> int:
        return sum(seen.sent[0] for seen in self.proxy.seen)

    def close(self) -> None:
        self.proxy.close()
        self.web.shutdown()
        self.web.server_close()


class _WebHandler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            return self.send_error(404)
        content = path.read_bytes()
        start, end = (self.headers["Range"] or f"bytes=0-{len(content)}").removeprefix("bytes=").split("-")
        piece = content[int(start) : int(end) + 1]
        if not piece:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {start}-{int(start) + len(piece) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(piece)))
        self.end_headers()
        self.wfile.write(piece)
        return None

    def log_message(self, format: str, *args: object) -> None:
        pass


def tls(certificate: Path) -> ssl.SSLContext:
    """A server's context with a new certificate for 127.0.0.1, which clients must be told to trust."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    certificate.write_bytes(signed.public_bytes(pem))
    both = certificate.with_suffix(".key")
    both.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain) + certificate.read_bytes())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(both)
    return context
