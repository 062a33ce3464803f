"""Does a manifest hold only fields that its kind has, with the right types?

Kubernetes' own kinds are checked against its published schemas, KubeRay's against its CRDs where
these are at hand, and the few third-party kinds against the part of their schema that is written
here. Everywhere an unknown field is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.helm.rendering import Manifest, pod_templates
from tests.helm.tools import CHECKOUT

CRDS = CHECKOUT.parent / "shared" / "crds"
KUBERNETES_VERSION = "1.37.0"


def check(manifest: Manifest, crds: dict[str, jsonschema.Draft7Validator]) -> list[str]:
    """What is wrong with a manifest, in words; nothing for a valid one."""
    kind, group = manifest["kind"], manifest["apiVersion"].rpartition("/")[0]
    if group == "ray.io":
        problems = _problems(crds[kind], manifest) if kind in crds else []
        for name, template in pod_templates([manifest]):
            pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {}, "template": template}
            problems += [f"{name}: {problem}" for problem in _check_kubernetes(pod)]
        return problems
    if kind in THIRD_PARTY:
        return _problems(THIRD_PARTY[kind], manifest)
    return _check_kubernetes(manifest)


def _check_kubernetes(manifest: Manifest) -> list[str]:
    try:
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        path = "/".join(map(str, error.path))
        return [f"{manifest['kind']} {path}: {error.message}"]
    return []


def _problems(validator: jsonschema.Draft7Validator, manifest: Manifest) -> list[str]:
    return [
        f"{manifest['kind']} {'/'.join(map(str, error.absolute_path))}: {error.message}"
        for error in validator.iter_errors(manifest)
    ]


def load_crds(folder: Path = CRDS) -> dict[str, jsonschema.Draft7Validator]:
    """Kind -> validator that refuses unknown fields, for version v1 of each CRD in a folder."""
    validators = {}
    for file in sorted(folder.glob("*.yaml")):
        crd = yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader)
        (version,) = (each for each in crd["spec"]["versions"] if each["name"] == "v1")
        schema = strict(version["schema"]["openAPIV3Schema"])
        schema["properties"]["metadata"] = METADATA  # a CRD leaves it to the API server
        validators[crd["spec"]["names"]["kind"]] = jsonschema.Draft7Validator(schema)
    return validators


def strict(schema: Any) -> Any:
    """A CRD's structural schema as JSON schema in which unknown fields are errors.

    A structural schema prunes fields that it does not name, unless it says to preserve them.
    """
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = {
        key: {name: strict(each) for name, each in value.items()}
        if key == "properties"
        else value
        if key in ("default", "enum", "required")
        else strict(value)
        for key, value in schema.items()
    }
    closed = "additionalProperties" in schema or "x-kubernetes-preserve-unknown-fields" in schema
    if schema.get("type") == "object" and not closed:
        result["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    if schema.get("nullable") and "type" in result:
        result["type"] = [result["type"], "null"]
    return result


def _closed(required: tuple[str, ...] = (), **properties: Any) -> Manifest:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _listed(items: Manifest) -> Manifest:
    return {"type": "array", "items": items, "minItems": 1}


STRING = {"type": "string"}
STRINGS = {"type": "object", "additionalProperties": STRING}
DURATION = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"}
METADATA = _closed(("name",), name=STRING, namespace=STRING, labels=STRINGS, annotations=STRINGS)
SELECTOR = _closed(("matchLabels",), matchLabels=STRINGS)
ENDPOINT = _closed(("port",), port=STRING, path=STRING, interval=DURATION, scrapeTimeout=DURATION)


def _kind(api_version: str, spec: Manifest) -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(
        _closed(
            ("apiVersion", "kind", "metadata", "spec"),
            apiVersion={"const": api_version},
            kind=STRING,
            metadata=METADATA,
            spec=spec,
        )
    )


# Written from the kinds' documentation, as far as the chart uses them.
THIRD_PARTY = {
    "ServiceMonitor": _kind(
        "monitoring.coreos.com/v1",
        _closed(("selector", "endpoints"), selector=SELECTOR, endpoints=_listed(ENDPOINT)),
    ),
    "PodMonitor": _kind(
        "monitoring.coreos.com/v1",
        _closed(
            ("selector", "podMetricsEndpoints"),
            selector=SELECTOR,
            podMetricsEndpoints=_listed(ENDPOINT),
        ),
    ),
    "PrometheusRule": _kind(
        "monitoring.coreos.com/v1",
        _closed(
            ("groups",),
            groups=_listed(
                _closed(
                    ("name", "rules"),
                    name=STRING,
                    rules=_listed(
                        _closed(
                            ("alert", "expr"),
                            alert=STRING,
                            expr=STRING,
                            **{"for": DURATION, "labels": STRINGS, "annotations": STRINGS},
                        )
                    ),
                )
            ),
        ),
    ),
    "HTTPRoute": _kind(
        "gateway.networking.k8s.io/v1",
        _closed(
            ("parentRefs", "rules"),
            parentRefs=_listed(
                _closed(
                    ("name",),
                    name=STRING,
                    namespace=STRING,
                    sectionName=STRING,
                    group=STRING,
                    kind=STRING,
                    port={"type": "integer"},
                )
            ),
            hostnames={"type": "array", "items": STRING},
            rules=_listed(
                _closed(
                    ("backendRefs",),
                    matches=_listed(
                        _closed(
                            path=_closed(
                                type={"enum": ["PathPrefix", "Exact", "RegularExpression"]},
                                value=STRING,
                            )
                        )
                    ),
                    timeouts=_closed(request=DURATION, backendRequest=DURATION),
                    backendRefs=_listed(
                        _closed(("name", "port"), name=STRING, port={"type": "integer"})
                    ),
                )
            ),
        ),
    ),
}
