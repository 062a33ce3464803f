"""The few answers of a Kubernetes API server that Helm's `lookup` of a Secret needs.

A stand-in: no real API server can run in the tests. It holds Secrets of one namespace.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

KINDS = {
    "v1": ["ConfigMap", "PersistentVolumeClaim", "Secret", "Service", "ServiceAccount"],
    "apps/v1": ["Deployment", "StatefulSet"],
    "policy/v1": ["PodDisruptionBudget"],
    "ray.io/v1": ["RayService"],
}


@contextmanager
def api_server(release: str, namespace: str, secrets: dict[str, dict[str, str]]) -> Iterator[str]:
    """URL of a server that holds these Secrets of a release (name -> key -> value)."""
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": _groups()},
    }
    for group_version, kinds in KINDS.items():
        path = f"/api/{group_version}" if group_version == "v1" else f"/apis/{group_version}"
        answers[path] = {
            "kind": "APIResourceList",
            "groupVersion": group_version,
            "resources": [
                {"name": f"{kind.lower()}s", "kind": kind, "namespaced": True, "verbs": ["get"]}
                for kind in kinds
            ],
        }
    for name, values in secrets.items():
        answers[f"/api/v1/namespaces/{namespace}/secrets/{name}"] = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": name,
                "namespace": namespace,
                "labels": {"app.kubernetes.io/managed-by": "Helm"},
                "annotations": {
                    "meta.helm.sh/release-name": release,
                    "meta.helm.sh/release-namespace": namespace,
                },
            },
            "data": {
                key: base64.b64encode(value.encode()).decode() for key, value in values.items()
            },
        }
    missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            body = json.dumps(answer or missing | {"code": 404}).encode()
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, name="api-server")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _groups() -> list[dict[str, Any]]:
    groups = []
    for group_version in KINDS:
        if group_version != "v1":
            group, _, version = group_version.partition("/")
            named = {"groupVersion": group_version, "version": version}
            groups.append({"name": group, "versions": [named], "preferredVersion": named})
    return groups
