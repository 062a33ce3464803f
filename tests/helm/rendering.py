"""Rendering the chart, and reading what came out as Kubernetes would."""

from __future__ import annotations

import base64
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.helm.tools import CHECKOUT

CHART = CHECKOUT / "helm" / "stemroute"
RELEASE = "rel"
NAMESPACE = "models"

Manifest = dict[str, Any]


class HelmError(Exception):
    """Helm refused; the text is what it said."""


class _UniqueKeys(yaml.CSafeLoader):
    """YAML in which a key given twice is an error, as it is for a Kubernetes API server."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.YAMLError(f"given twice: {sorted(twice)} {node.start_mark}")
        return super().construct_mapping(node, deep)


def run_helm(helm: Path, *arguments: str, environ: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [helm, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"HOME": "/nonexistent", "KUBECONFIG": "/dev/null"} | (environ or {}),
    )
    if done.returncode:
        raise HelmError(done.stderr + done.stdout)
    return done.stdout


def render(helm: Path, folder: Path, values: Manifest, *more: str) -> list[Manifest]:
    """The manifests of a release with these values over the chart's own."""
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    text = run_helm(
        helm, "template", RELEASE, str(CHART), "--namespace", NAMESPACE, "-f", str(file), *more
    )
    return [manifest for manifest in yaml.load_all(text, _UniqueKeys) if manifest]


def one(manifests: list[Manifest], kind: str, name_end: str = "") -> Manifest:
    (found,) = (
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and manifest["metadata"]["name"].endswith(name_end)
    )
    return found


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every pod template, with a name for it."""
    for manifest in manifests:
        name = manifest["metadata"].get("name", "")
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            yield name, manifest["spec"]["template"]
        elif manifest["kind"] == "RayService":
            cluster = manifest["spec"]["rayClusterConfig"]
            yield f"{name} head", cluster["headGroupSpec"]["template"]
            for group in cluster["workerGroupSpecs"]:
                yield f"{name} {group['groupName']}", group["template"]


def containers(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every container that runs on (no init containers), with its name."""
    for name, template in pod_templates(manifests):
        for container in template["spec"]["containers"]:
            yield f"{name}/{container['name']}", container


def container(manifests: list[Manifest], name: str) -> Manifest:
    """The first container of a name; worker groups each have a "ray-worker"."""
    return next(each for path, each in containers(manifests) if path.endswith("/" + name))


def secrets_of(manifests: list[Manifest]) -> dict[tuple[str, str], str]:
    """(name, key) -> value of the rendered Secrets."""
    return {
        (manifest["metadata"]["name"], key): base64.b64decode(value).decode()
        for manifest in manifests
        if manifest["kind"] == "Secret"
        for key, value in manifest["data"].items()
    }


def environment(container: Manifest, secrets: dict[tuple[str, str], str]) -> dict[str, str]:
    """A container's environment as its process sees it.

    A later entry may name an earlier one as $(NAME); one that is not defined stays as it is.
    """
    result: dict[str, str] = {}
    for entry in container.get("env", []):
        source = entry.get("valueFrom", {})
        if "secretKeyRef" in source:
            value = secrets[source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]]
        elif "fieldRef" in source:
            assert source["fieldRef"]["fieldPath"] == "status.podIP"
            value = "10.0.0.7"
        else:
            value = re.sub(
                r"\$\((\w+)\)",
                lambda match: result.get(match[1], match[0]),
                entry["value"],
            )
        assert entry["name"] not in result, f"{entry['name']} is set twice"
        result[entry["name"]] = value
    return result


def serve_config(manifests: list[Manifest]) -> Manifest:
    config: Manifest = yaml.load(one(manifests, "RayService")["spec"]["serveConfigV2"], _UniqueKeys)
    return config
