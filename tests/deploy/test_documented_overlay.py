"""docs/operate.md's own overlay, as an operator would write it: it builds, and every check holds."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from deploy.k8s.access import GIVEN
from deploy.k8s.builds import K8S, rendered
from deploy.k8s.validate import CHECKS
from shared.auth.rules import RULES
from shared.auth.tokens import TokenFile, hash_token

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


def documented() -> tuple[dict[str, Any], dict[str, Any]]:
    """The overlay, and what is added to it for TLS; with paths as they are beside the base, and a digest."""
    text = [block.replace("loraplex/deploy/k8s/", "../").replace("sha256:…", f"sha256:{64 * '0'}") for block in BLOCKS]
    overlay, tls = map(yaml.safe_load, text)
    return overlay, tls


def test_the_overlay_is_valid() -> None:
    overlay, _ = documented()
    manifests = rendered(overlay)
    assert [error for check in CHECKS for error in check(manifests)] == []
    found = {(item["kind"], item["metadata"]["name"]): item for item in manifests}
    account = found["ServiceAccount", "loraplex-inference"]
    assert account["metadata"]["annotations"]["eks.amazonaws.com/role-arn"].startswith("arn:aws:iam::")
    (container,) = found["Deployment", "loraplex-inference"]["spec"]["template"]["spec"]["containers"]
    assert re.fullmatch(r"REGISTRY/loraplex-inference@sha256:0{64}", container["image"])


def test_the_certificate_has_the_name_that_clients_are_told_to_use() -> None:
    overlay, tls = documented()
    overlay["components"].append("../components/tls")
    overlay["patches"] += tls["patches"]
    manifests = rendered(overlay)
    assert [error for check in CHECKS for error in check(manifests)] == []
    (names,) = [
        item["spec"]["dnsNames"]
        for item in manifests
        if (item["kind"], item["metadata"]["name"]) == ("Certificate", "loraplex-inference")
    ]
    assert f"loraplex-inference-replicas.{overlay['namespace']}" in names


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
