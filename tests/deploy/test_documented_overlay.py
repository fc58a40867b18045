"""docs/operate.md's own overlay, as an operator would write it: it builds, and every check holds."""

import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from deploy.k8s.access import GIVEN
from deploy.k8s.builds import K8S, rendered
from deploy.k8s.policy import workload_errors
from deploy.k8s.schemas import schema_errors
from deploy.k8s.validate import CHECKS
from shared.auth.rules import RULES
from shared.auth.tokens import TokenFile, hash_token
from shared.base_model import default_id

TEXT = (K8S.parents[1] / "docs" / "operate.md").read_text()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
(SECRETS,) = [block for block in re.findall(r"^```console\n(.*?)^```", TEXT, re.M | re.S) if "create secret" in block]
# Takes the place of kubectl: a folder for each Secret, with its keys.
KUBECTL = """#!/bin/bash
[ "$1 $2" = "create namespace" ] && exit
[ "$1 $3 $4 $5" = "-n create secret generic" ] || exit 1
mkdir "$6"
case "$7" in
    --from-literal=*) pair=${7#--from-literal=}; echo "${pair#*=}" > "$6/${pair%%=*}" ;;
    --from-file=*) pair=${7#--from-file=}; cp "${pair#*=}" "$6/${pair%%=*}" ;;
esac
"""


class Documented(NamedTuple):
    """The overlay, the pod that fills the volume, and what is added for a model's id, TLS and an operator's label."""

    overlay: dict[str, Any]
    copying: dict[str, Any]
    model: dict[str, Any]
    tls: dict[str, Any]
    label: dict[str, Any]


def documented() -> Documented:
    """With paths of this checkout, and a digest."""
    text = [
        block.replace("loraplex/deploy/k8s/", f"{K8S}/").replace("sha256:…", f"sha256:{64 * '0'}") for block in BLOCKS
    ]
    return Documented(*map(yaml.safe_load, text))


def test_the_overlay_is_valid() -> None:
    overlay = documented().overlay
    manifests = rendered(overlay)
    assert [error for check in CHECKS for error in check(manifests)] == []
    found = {(item["kind"], item["metadata"]["name"]): item for item in manifests}
    account = found["ServiceAccount", "loraplex-inference"]
    assert account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"].startswith("arn:aws:iam::")
    (container,) = found["Deployment", "loraplex-inference"]["spec"]["template"]["spec"]["containers"]
    assert re.fullmatch(r"REGISTRY/loraplex-inference@sha256:0{64}", container["image"])


def test_the_certificate_has_the_name_that_clients_are_told_to_use() -> None:
    overlay, _, _, tls, _ = documented()
    overlay["components"].append(str(K8S / "components" / "tls"))
    overlay["patches"] += tls["patches"]
    manifests = rendered(overlay)
    assert [error for check in CHECKS for error in check(manifests)] == []
    (names,) = [
        item["spec"]["dnsNames"]
        for item in manifests
        if (item["kind"], item["metadata"]["name"]) == ("Certificate", "loraplex-inference")
    ]
    assert f"loraplex-inference-replicas.{overlay['namespace']}" in names


def test_the_pod_that_fills_the_volume_writes_what_replicas_can_read() -> None:
    overlay, pod, *_ = documented()
    assert list(schema_errors([pod])) == []
    assert list(workload_errors({"metadata": pod["metadata"], "spec": {"template": pod}})) == []
    found = {(item["kind"], item["metadata"]["name"]): item for item in rendered(overlay)}
    (volume,) = pod["spec"]["volumes"]
    claim = found["PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]]
    assert claim["metadata"]["namespace"] == pod["metadata"]["namespace"]
    replica = found["Deployment", "loraplex-inference"]["spec"]["template"]["spec"]
    ids = ("runAsUser", "runAsGroup", "fsGroup")
    assert [pod["spec"]["securityContext"][key] for key in ids] == [replica["securityContext"][key] for key in ids]
    (config,) = [
        item for (kind, name), item in found.items() if kind == "ConfigMap" and "inference.toml" in item["data"]
    ]
    model = tomllib.loads(config["data"]["inference.toml"])["model"]
    assert f"exec {pod['metadata']['name']} -- mv /models/copying {model} " in TEXT
    assert f"`--base-model {default_id(model)}`" in TEXT


def test_the_label_that_an_operator_selects_by_is_on_all_that_it_reads() -> None:
    overlay, *_, label = documented()
    overlay["patches"] += label["patches"]
    manifests = rendered(overlay)
    assert [error for check in CHECKS for error in check(manifests)] == []
    kinds = {"ServiceMonitor", "PrometheusRule"}
    labelled = [item for item in manifests if item["metadata"].get("labels", {}).get("release")]
    assert {item["kind"] for item in labelled} == kinds
    assert len(labelled) == len([item for item in manifests if item["kind"] in kinds])


def test_operators_read_the_files_of_the_client_certificate(tmp_path: Path) -> None:
    """The loop over the Secret's keys, which have dots: jsonpath wants a backslash before them."""
    (loop,) = re.findall(r"^for file in .*?^done$", TEXT, re.MULTILINE | re.DOTALL)
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text('#!/bin/bash\nprintf "%s" "$7" | base64\n')
    kubectl.chmod(0o755)
    path = f"{kubectl.parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-euc", loop], cwd=tmp_path, env={"PATH": path}, check=True)
    for name in ("ca", "tls"):
        assert (tmp_path / f"{name}.crt").read_text() == f"jsonpath={{.data.{name}\\.crt}}"


def test_the_operators_shell_keeps_its_umask(tmp_path: Path) -> None:
    (tmp_path / "kubectl").write_text("#!/bin/bash\n")
    (tmp_path / "kubectl").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    script = f"umask 022\n{SECRETS}\numask"
    ran = subprocess.run(["bash", "-euc", script], cwd=tmp_path, env={"PATH": path}, check=True, capture_output=True)
    assert ran.stdout == b"0022\n"
    assert {(tmp_path / f"{who}.token").stat().st_mode & 0o777 for who in ("operator", "replica")} == {0o600}


def test_the_documented_commands_make_the_secrets_that_are_mounted(tmp_path: Path) -> None:
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.parent.mkdir()
    kubectl.write_text(KUBECTL)
    kubectl.chmod(0o755)
    path = f"{kubectl.parent}:{os.environ['PATH']}"
    subprocess.run(["bash", "-euc", SECRETS], cwd=tmp_path, env={"PATH": path}, check=True)
    for secret, keys in GIVEN.items():
        assert {each.name for each in (tmp_path / secret).iterdir()} == keys
    known = TokenFile(tmp_path / "loraplex-tokens" / "tokens.toml")
    replica = known.caller(hash_token((tmp_path / "loraplex-replica-token" / "token").read_text()))
    operator = known.caller(hash_token((tmp_path / "operator.token").read_text()))
    assert replica is not None
    assert operator is not None
    assert operator.has_everywhere(["operator"])
    assert replica.has_everywhere(["replica"])
    assert not replica.has_anywhere(["operator"])
    control = {rule.roles for rpc, rule in RULES.items() if ".AdapterControlService/" in rpc}
    assert control == {frozenset({"operator"})}
