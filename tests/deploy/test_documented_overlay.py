"""docs/operate.md's own overlay, as an operator would write it: it builds, and every check holds."""

import re
from typing import Any

import yaml

from deploy.k8s.builds import K8S, rendered
from deploy.k8s.validate import CHECKS

BLOCKS = re.findall(
    r"^```yaml\n(.*?)^```", (K8S.parents[1] / "docs" / "operate.md").read_text(), re.MULTILINE | re.DOTALL
)


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
