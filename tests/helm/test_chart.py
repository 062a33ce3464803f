"""The chart renders valid manifests for every kind of user, and refuses what cannot work."""

from __future__ import annotations

import copy
import json
import re

import jsonschema
import pytest
import yaml

from tests.helm.api_server import api_server
from tests.helm.checking import check
from tests.helm.rendering import (
    CHART,
    NAMESPACE,
    RELEASE,
    HelmError,
    container,
    containers,
    one,
    pod_templates,
    render,
    run_helm,
    secrets_of,
)
from tests.helm.tools import CHECKOUT
from tests.helm.value_sets import VALUE_SETS

RAY_GROUP = ["spec", "rayClusterConfig", "workerGroupSpecs", 0]
ALL_SETS = pytest.mark.parametrize("name", VALUE_SETS)


def test_lint_is_clean(helm):
    run_helm(helm, "lint", "--strict", str(CHART))


@ALL_SETS
def test_manifests_hold_only_fields_that_kubernetes_has(rendered, name):
    problems = [problem for each in rendered(name) for problem in check(each, crds={})]
    assert problems == []


@ALL_SETS
def test_rayservice_holds_only_fields_that_kuberay_has(rendered, crds, name):
    assert check(one(rendered(name), "RayService"), crds) == []


def misspell(manifest, path):
    """The manifest with an `x` at the end of the last key of a path."""
    wrong = copy.deepcopy(manifest)
    at = wrong
    for key in path[:-1]:
        at = at[key]
    at[path[-1] + "x"] = at.pop(path[-1])
    return wrong


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("Deployment", ["spec", "replicas"]),
        ("Deployment", ["spec", "template", "spec", "enableServiceLinks"]),
        ("Deployment", ["spec", "template", "spec", "containers", 0, "livenessProbe", "httpGet"]),
        ("StatefulSet", ["spec", "template", "spec", "containers", 0, "env", 0, "valueFrom"]),
        ("PodDisruptionBudget", ["spec", "maxUnavailable"]),
        ("RayService", [*RAY_GROUP, "template", "spec", "enableServiceLinks"]),
    ],
)
def test_the_check_finds_a_misspelt_field(rendered, kind, path):
    wrong = misspell(one(rendered("defaults"), kind), path)
    assert any(f"{path[-1]}x" in problem for problem in check(wrong, crds={}))


@pytest.mark.parametrize(
    "path",
    [
        ["metadata", "name"],
        ["spec", "upgradeStrategy"],
        ["spec", "rayClusterConfig", "rayVersion"],
        [*RAY_GROUP, "rayStartParams"],
        ["spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "enableServiceLinks"],
    ],
)
def test_the_check_finds_a_misspelt_field_of_kuberay(rendered, crds, path):
    wrong = misspell(one(rendered("defaults"), "RayService"), path)
    problems = check(wrong, crds)
    assert any(f"{path[-1]}x" in each or f"'{path[-1]}'" in each for each in problems), problems


def test_the_check_finds_a_wrong_type_of_kuberay(rendered, crds):
    wrong = copy.deepcopy(one(rendered("defaults"), "RayService"))
    wrong["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["maxReplicas"] = "two"
    assert any("maxReplicas" in problem for problem in check(wrong, crds))


@pytest.mark.parametrize("kind", ["ServiceMonitor", "PodMonitor", "PrometheusRule", "HTTPRoute"])
def test_the_check_finds_a_misspelt_field_of_third_parties(rendered, kind):
    manifest = one(rendered("everything_scales_and_is_watched"), kind)
    field = next(key for key in manifest["spec"] if key != "selector")
    assert any(f"{field}x" in each for each in check(misspell(manifest, ["spec", field]), {}))


# Values


def schema():
    return json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "setting",
    [
        "gateway.replica=3",
        "worker.gpu=2",
        "worker.settings.kv_block=4",
        "gateway.ingress.host=a",
        "valkey.auth.password=a",
        "worker.gpus=one",
        "gateway.service.type=Cluster",
    ],
)
def test_helm_refuses_a_misspelt_or_mistyped_value(helm, setting):
    with pytest.raises(HelmError, match=setting.partition("=")[0].split(".")[-1]):
        run_helm(helm, "template", RELEASE, str(CHART), "--set", setting)


def test_every_level_of_the_values_is_closed():
    """An unknown key is refused wherever a value is the chart's own, at each depth."""
    validator = jsonschema.Draft7Validator(schema())
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    handed_on = {"kubernetesObject", "kubernetesList", "stringMap"}
    levels = 0

    def walk(node, part, path):
        nonlocal levels
        part = dict(part)
        while "$ref" in part:
            name = part.pop("$ref").rpartition("/")[2]
            if name in handed_on:
                return
            part = schema()["definitions"][name]
        if part.get("type") != "object" or "properties" not in part:
            return
        levels += 1
        node["unknownKey"] = 1
        assert not validator.is_valid(values), f"an unknown key passes at {path}"
        del node["unknownKey"]
        for key, below in part["properties"].items():
            if isinstance(node.get(key), dict):
                walk(node[key], below, f"{path}.{key}")

    walk(values, schema(), "values")
    assert validator.is_valid(values)
    assert levels > 30


def test_every_value_of_the_schema_has_a_default():
    """So that values.yaml shows all there is. Settings are the program's own; see its docs."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))

    def walk(node, part, path):
        for key, below in part.get("properties", {}).items():
            if key == "global" or path.endswith((".settings", ".bus", ".resources")):
                continue
            assert key in node, f"{path}.{key} is in the schema, but not in values.yaml"
            if isinstance(node[key], dict):
                walk(node[key], below, f"{path}.{key}")

    walk(values, schema(), "values")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"valkey": {"enabled": False}}, "set externalRedis.url"),
        ({"externalRedis": {"url": "redis://a:6379"}}, "valkey.enabled is true as well"),
        (
            {"valkey": {"enabled": False}, "externalRedis": {"url": "redis://:open@a:6379"}},
            "holds a password",
        ),
        ({"valkey": {"auth": {"value": "two\nlines"}}}, "line break"),
        ({"ray": {"gcsFaultTolerance": {"enabled": True}}}, "valkey.persistence.enabled=true"),
        (
            {
                "valkey": {"enabled": False},
                "externalRedis": {"url": "redis+sentinel://a:26379,b:26379/main"},
                "ray": {"gcsFaultTolerance": {"enabled": True}},
            },
            "set ray.gcsFaultTolerance.redisAddress",
        ),
        (
            {"model": {"volume": {"existingClaim": "a", "create": {"enabled": True}}}},
            "set only one of",
        ),
        ({"worker": {"additionalGroups": [{"name": "workers", "replicas": 1}]}}, "is taken"),
        ({"worker": {"autoscaling": {"minReplicas": 9}}}, "greater than maxReplicas"),
        ({"gateway": {"ingress": {"enabled": True}}}, "hosts is empty"),
        ({"gateway": {"httpRoute": {"enabled": True}}}, "parentRefs is empty"),
    ],
)
def test_values_that_cannot_work_are_refused_with_what_to_change(helm, tmp_path, values, reason):
    with pytest.raises(HelmError) as caught:
        render(helm, tmp_path, values)
    assert reason in str(caught.value)


# What is rendered


@ALL_SETS
def test_no_pod_gets_service_links(rendered, name):
    """Kubernetes would set STEMROUTE_GATEWAY_PORT=tcp://… over the setting of that name."""
    templates = list(pod_templates(rendered(name)))
    assert len(templates) >= 3
    for pod, template in templates:
        assert template["spec"]["enableServiceLinks"] is False, pod


@ALL_SETS
def test_containers_run_without_privileges(rendered, name):
    for path, each in containers(rendered(name)):
        assert each["securityContext"]["allowPrivilegeEscalation"] is False, path
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}, path
    for pod, template in pod_templates(rendered(name)):
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True, pod
    assert container(rendered(name), "gateway")["securityContext"]["readOnlyRootFilesystem"]


@ALL_SETS
def test_no_worker_lands_on_the_head(rendered, name):
    """Ray books nothing there, and every worker pod has room for exactly one worker."""
    cluster = one(rendered(name), "RayService")["spec"]["rayClusterConfig"]
    head = cluster["headGroupSpec"]
    assert (head["rayStartParams"]["num-cpus"], head["rayStartParams"]["num-gpus"]) == ("0", "0")
    limits = head["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert not any("gpu" in resource for resource in limits)
    # KubeRay makes no Service for Ray Serve, and reports an error, where this port is missing.
    ports = head["template"]["spec"]["containers"][0]["ports"]
    assert "serve" in [port["name"] for port in ports]


def test_gpus_are_booked_with_kubernetes_and_ray(rendered):
    cluster = one(rendered("gpu_with_existing_claim"), "RayService")["spec"]["rayClusterConfig"]
    for group in cluster["workerGroupSpecs"]:
        worker = group["template"]["spec"]["containers"][0]
        assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert worker["resources"]["requests"]["nvidia.com/gpu"] == 1
        assert group["rayStartParams"] == {"num-cpus": "8", "num-gpus": "1"}
    cluster = one(rendered("emulated_without_gpu"), "RayService")["spec"]["rayClusterConfig"]
    worker = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    assert "nvidia.com/gpu" not in worker["resources"]["limits"]


def test_an_additional_group_has_its_own_scheduling(rendered):
    cluster = one(rendered("gpu_with_existing_claim"), "RayService")["spec"]["rayClusterConfig"]
    first, second = cluster["workerGroupSpecs"]
    assert (first["groupName"], first["replicas"]) == ("workers", 4)
    assert (second["groupName"], second["replicas"]) == ("h100", 2)
    first, second = first["template"]["spec"], second["template"]["spec"]
    assert (first["nodeSelector"], second["nodeSelector"]) == ({"gpu": "h200"}, {"gpu": "h100"})
    assert [each["key"] for each in second["tolerations"]] == ["h100"]
    assert "affinity" in first
    assert "affinity" not in second
    assert second["runtimeClassName"] == "nvidia"
    sizes = [
        next(each for each in pod["volumes"] if each["name"] == "shared-mem")["emptyDir"]
        for pod in (first, second)
    ]
    assert [size["sizeLimit"] for size in sizes] == ["16Gi", "8Gi"]


def test_the_worker_sees_its_model_read_only(rendered):
    worker = container(rendered("download_to_new_claim"), "ray-worker")
    (mount,) = (each for each in worker["volumeMounts"] if each["name"] == "model")
    assert mount == {"name": "model", "mountPath": "/models", "readOnly": True}
    claim = one(rendered("download_to_new_claim"), "PersistentVolumeClaim")
    (_, template) = next(
        each for each in pod_templates(rendered("download_to_new_claim")) if "workers" in each[0]
    )
    (volume,) = (each for each in template["spec"]["volumes"] if each["name"] == "model")
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    (download,) = template["spec"]["initContainers"]
    assert " ".join(download["command"] + download["args"]) == (
        "hf download Qwen/Qwen3-8B --revision 0123456 --local-dir /models/Qwen/Qwen3-8B"
    )
    (token,) = (each for each in download["env"] if each["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hub-login", "key": "token"}
    environment = {each["name"]: each.get("value") for each in download["env"]}
    assert environment["HF_ENDPOINT"] == "https://hub.example.com"
    assert environment["HTTPS_PROXY"] == "http://proxy.example.com:3128"
    assert download["envFrom"] == [{"secretRef": {"name": "hub-settings"}}]


def test_selectors_find_their_pods(rendered):
    manifests = rendered("everything_scales_and_is_watched")
    labels = [template["metadata"]["labels"] for _, template in pod_templates(manifests)]
    selecting = [each for each in manifests if each["kind"] in SELECTED_BY]
    assert len(selecting) > 8
    for manifest in selecting:
        selector = SELECTED_BY[manifest["kind"]](manifest["spec"])
        hits = [each for each in labels if selector.items() <= each.items()]
        component = manifest["metadata"]["labels"]["app.kubernetes.io/component"]
        assert {each["app.kubernetes.io/component"] for each in hits} == {component}
    service = one(manifests, "Service", "-gateway")
    monitor = one(manifests, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert monitor.items() <= service["metadata"]["labels"].items()


SELECTED_BY = {
    "Service": lambda spec: spec["selector"],
    "Deployment": lambda spec: spec["selector"]["matchLabels"],
    "StatefulSet": lambda spec: spec["selector"]["matchLabels"],
    "PodDisruptionBudget": lambda spec: spec["selector"]["matchLabels"],
    "PodMonitor": lambda spec: spec["selector"]["matchLabels"],
    "NetworkPolicy": lambda spec: spec["podSelector"]["matchLabels"],
}


def test_named_ports_exist_in_the_pods(rendered):
    """Probes, Services, network policies and monitors name ports instead of numbering them."""
    manifests = rendered("everything_scales_and_is_watched")
    ports = {}
    for path, each in containers(manifests):
        ports |= {port["name"]: port["containerPort"] for port in each["ports"]}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if "httpGet" in each.get(probe, {}):
                names = [port["name"] for port in each["ports"]]
                assert each[probe]["httpGet"]["port"] in names, path
    for name in ("-gateway", "-valkey"):
        for port in one(manifests, "Service", name)["spec"]["ports"]:
            assert port["targetPort"] in ports
    assert one(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"][0]["port"] in ports
    gateway_ports = [
        each["name"] for each in one(manifests, "Service", "-gateway")["spec"]["ports"]
    ]
    assert one(manifests, "ServiceMonitor")["spec"]["endpoints"][0]["port"] in gateway_ports


def test_alerts_speak_of_metrics_that_gateways_have(rendered):
    manifests = rendered("everything_scales_and_is_watched")
    (group,) = one(manifests, "PrometheusRule")["spec"]["groups"]
    known = {name for name in documented_metrics() if name.startswith("stemroute_gateway_")}
    service = one(manifests, "Service", "-gateway")["metadata"]["name"]
    for rule in group["rules"]:
        named = set(re.findall(r"stemroute_\w+", rule["expr"]))
        assert named
        assert named <= known
        assert f'service="{service}"' in rule["expr"]


def documented_metrics():
    return re.findall(r"`(stemroute_\w+)`", (CHECKOUT / "docs/metrics.md").read_text("utf-8"))


def test_an_autoscaler_owns_the_replicas(rendered):
    manifests = rendered("everything_scales_and_is_watched")
    assert "replicas" not in one(manifests, "Deployment")["spec"]
    target = one(manifests, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert target["name"] == one(manifests, "Deployment")["metadata"]["name"]
    cluster = one(manifests, "RayService")["spec"]["rayClusterConfig"]
    first, spare = cluster["workerGroupSpecs"]
    assert cluster["enableInTreeAutoscaling"] is True
    assert "replicas" not in first
    assert (first["minReplicas"], first["maxReplicas"]) == (2, 12)
    assert (spare["replicas"], spare["minReplicas"], spare["maxReplicas"]) == (1, 1, 1)


def test_extra_objects_are_templates(rendered):
    extra = one(rendered("extra_objects"), "ConfigMap", "-extra")
    assert extra["metadata"]["name"] == "stem-extra"
    assert extra["data"] == {"pool": "shared"}
    assert one(rendered("extra_objects"), "ConfigMap", "second")["data"] == {"a": "b"}


def test_generated_secrets_stay_the_same_over_upgrades(helm, tmp_path):
    """Helm asks the API server for the Secret that an earlier install made."""
    name = f"{RELEASE}-stemroute"
    there = {"pool-secret": "made before", "valkey-password": "madebefore"}
    server_side = ["--dry-run=server", "--disable-openapi-validation", "--kube-apiserver"]
    with api_server(RELEASE, NAMESPACE, {name: there}) as url:
        upgraded = secrets_of(render(helm, tmp_path, {}, *server_side, url))
    with api_server(RELEASE, NAMESPACE, {}) as url:
        fresh = secrets_of(render(helm, tmp_path, {}, *server_side, url))
    assert {key: upgraded[name, key] for key in there} == there
    assert len(upgraded[name, "admin-key"]) == 40  # was not there: made now
    assert all(len(value) == 40 for value in fresh.values())
    assert len(set(fresh.values())) == len(fresh) == 3


def test_notes_tell_how_to_reach_it_and_how_to_compare(helm):
    notes = run_helm(helm, "install", RELEASE, str(CHART), "--dry-run=client")
    notes = notes[notes.index("NOTES:") :]
    assert "port-forward service/rel-stemroute-gateway 8000:80" in notes
    assert "loadgen compare --url http://127.0.0.1:8000 --policies round_robin,locality" in notes
    assert """-o go-template='{{ index .data "admin-key" | base64decode }}'""" in notes
