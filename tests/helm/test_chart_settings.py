"""What the chart sets are real settings of the program, and secrets stay in Secrets."""

from __future__ import annotations

import base64
import math

import msgspec
import pytest
from redis.connection import parse_url

from cluster.settings import (
    BusSettings,
    GatewaySettings,
    ServeSettings,
    Settings,
    WorkerSettings,
    load_settings,
)
from tests.helm.rendering import (
    container,
    containers,
    environment,
    one,
    render,
    secrets_of,
    serve_config,
)
from tests.helm.test_chart import schema
from tests.helm.value_sets import ADMIN_KEY, API_KEY, POOL_SECRET, VALKEY_PASSWORD, VALUE_SETS

ALL_SETS = pytest.mark.parametrize("name", VALUE_SETS)

USER_SECRETS = {
    ("redis-login", "password"): "outside-password@/",
    ("redis-login", "url"): "redis://:outside-password@redis.example.com:6379/3",
    ("mine", "pool"): "user-pool-secret",
    ("mine", "valkey"): "user-valkey-password",
    ("mine", "api"): "user-api-key",
    ("mine", "admin"): "user-admin-key",
}


def process_environment(manifests, name):
    return environment(container(manifests, name), secrets_of(manifests) | USER_SECRETS)


def application_args(manifests):
    (application,) = serve_config(manifests)["applications"]
    assert application["import_path"] == "ops.serve_app:application"
    return application["args"]


def worker_settings(manifests):
    """As a worker merges them: its environment, then the application's args."""
    flags = {
        f"{section}.{field}": value
        for section, fields in application_args(manifests).items()
        for field, value in fields.items()
    }
    return load_settings(environ=process_environment(manifests, "ray-worker"), flags=flags)


@ALL_SETS
def test_every_variable_of_the_chart_is_a_setting(rendered, name):
    """`load_settings` refuses unknown fields of a section; unknown top-level names it ignores."""
    known = {f"STEMROUTE_{field.upper()}" for field in Settings.__struct_fields__}
    sections = ("STEMROUTE_BUS_", "STEMROUTE_GATEWAY_", "STEMROUTE_WORKER_", "STEMROUTE_SERVE_")
    seen = 0
    for path, each in containers(rendered(name)):
        environ = environment(each, secrets_of(rendered(name)) | USER_SECRETS)
        load_settings(environ=environ)
        for variable in environ:
            if variable.startswith("STEMROUTE_"):
                seen += 1
                assert variable in known or variable.startswith(sections), (path, variable)
    assert seen >= 12


@ALL_SETS
def test_application_args_are_a_part_of_the_settings_tree(rendered, name):
    settings = msgspec.convert(application_args(rendered(name)), Settings)
    assert settings.worker.port == 8100


@ALL_SETS
def test_workers_and_gateways_agree(rendered, name):
    gateway = load_settings(environ=process_environment(rendered(name), "gateway"))
    worker = worker_settings(rendered(name))
    assert gateway.pool == worker.pool != "default"
    assert gateway.redis_url == worker.redis_url != ""
    assert gateway.secret == worker.secret != ""
    assert gateway.bus == worker.bus
    assert gateway.gateway.host == "0.0.0.0"
    assert worker.worker.host == "0.0.0.0"
    assert worker.worker.advertise_host == "10.0.0.7"
    port = container(rendered(name), "gateway")["ports"][0]["containerPort"]
    assert gateway.gateway.port == port
    port = container(rendered(name), "ray-worker")["ports"][0]["containerPort"]
    assert worker.worker.port == port


def test_values_reach_the_settings(rendered):
    """Large numbers too, which Helm would write as 1e+06."""
    worker = worker_settings(rendered("gpu_with_existing_claim"))
    assert worker.worker.model == "/models/llama-3-8b"
    assert worker.worker.served_name == "llama-3-8b"
    assert worker.worker.token_budget == 2_097_152
    assert worker.worker.kv_memory_share == 0.9
    assert worker.serve == ServeSettings(replicas=6, gpus_per_worker=1.0, cpus_per_worker=7.5)
    assert worker.bus.stream_max_reports == 1_000_000
    assert worker.bus.lease_s == 5.0
    environ = process_environment(rendered("everything_scales_and_is_watched"), "gateway")
    gateway = load_settings(environ=environ).gateway
    assert gateway.policy == "consistent_hash:bound=1.25"
    assert gateway.max_body_bytes == 16_777_216
    assert gateway.connect_timeout_s == 0.5


@pytest.mark.parametrize(
    ("section", "struct", "set_by_the_chart"),
    [
        (
            ("worker", "settings"),
            WorkerSettings,
            {"model", "served_name", "host", "advertise_host", "port", "cache_dir"},
        ),
        (
            ("gateway", "settings"),
            GatewaySettings,
            {"host", "port", "policy", "api_key", "admin_key"},
        ),
        (("bus",), BusSettings, set()),
    ],
)
def test_the_schema_knows_every_setting(section, struct, set_by_the_chart):
    part = schema()
    for key in section:
        part = part["properties"][key]
    assert set(part["properties"]) == set(struct.__struct_fields__) - set_by_the_chart


@ALL_SETS
def test_ray_serve_accepts_the_configuration(rendered, name):
    ray_schema = pytest.importorskip("ray.serve.schema")
    config = ray_schema.ServeDeploySchema.model_validate(serve_config(rendered(name)))
    assert config.proxy_location == "Disabled"
    assert config.applications[0].route_prefix is None


def test_autoscaling_goes_by_what_workers_tell(rendered):
    """Serve's own count of requests is 0: they do not come through Serve."""
    (application,) = serve_config(rendered("everything_scales_and_is_watched"))["applications"]
    (deployment,) = application["deployments"]
    assert deployment["num_replicas"] == "auto"
    scaling = deployment["autoscaling_config"]
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (3, 13)  # one is in group spare
    assert scaling["policy"] == {
        "policy_function": "ops.autoscaling:BatchSizePolicy",
        "policy_kwargs": {"target_batch_size": 16},
    }
    (application,) = serve_config(rendered("defaults"))["applications"]
    assert "deployments" not in application


def test_the_application_has_the_deployment_that_autoscaling_names(rendered):
    serve_app = pytest.importorskip("ops.serve_app", reason="needs Ray Serve")
    manifests = rendered("everything_scales_and_is_watched")
    (config,) = serve_config(manifests)["applications"]
    application = serve_app.application(config["args"])
    deployment = application._bound_deployment
    assert deployment.name == config["deployments"][0]["name"]
    assert callable(deployment.func_or_class.record_autoscaling_stats)


# Secrets


@pytest.mark.parametrize("name", ["defaults", "secrets_given", "secrets_of_the_user"])
def test_the_valkey_password_reaches_server_and_clients(rendered, name):
    manifests = rendered(name)
    password = process_environment(manifests, "valkey")["VALKEY_PASSWORD"]
    service = one(manifests, "Service", "-valkey")
    for client in ("gateway", "ray-worker", "ray-head"):
        url = parse_url(load_settings(environ=process_environment(manifests, client)).redis_url)
        assert url["password"] == password
        assert url["host"] == service["metadata"]["name"]
        assert url["port"] == service["spec"]["ports"][0]["port"]
    expected = {
        "secrets_given": VALKEY_PASSWORD,
        "secrets_of_the_user": "user-valkey-password",
    }
    assert password == expected.get(name, password)
    assert len(password) >= 20


@pytest.mark.parametrize(
    ("name", "host", "password"),
    [
        ("external_redis_with_password", "redis.example.com", "outside-password@/"),
        ("external_redis_url_from_secret", "redis.example.com", "outside-password"),
        ("external_redis_without_password", "redis.example.com", None),
    ],
)
def test_an_external_redis_is_reached_with_its_password(rendered, name, host, password):
    manifests = rendered(name)
    assert not [each for each in manifests if "valkey" in each["metadata"]["name"]]
    for client in ("gateway", "ray-worker", "ray-head"):
        url = parse_url(load_settings(environ=process_environment(manifests, client)).redis_url)
        assert (url["host"], url.get("password")) == (host, password)


@pytest.mark.parametrize(
    ("name", "address", "user", "secret"),
    [
        (
            "external_redis_with_password",
            "rediss://redis.example.com:6380",
            "stem",
            ("redis-login", "password"),
        ),
        (
            "external_redis_url_from_secret",
            "redis.example.com:6379",
            None,
            ("redis-login", "redis-password"),
        ),
        ("external_redis_without_password", "redis://redis.example.com:6379", None, None),
        (
            "download_to_new_claim",
            "redis://rel-stemroute-valkey:6379",
            None,
            ("rel-stemroute", "valkey-password"),
        ),
        ("defaults", None, None, None),
    ],
)
def test_ray_keeps_its_state_in_the_redis_of_the_release(rendered, name, address, user, secret):
    """No namespace is given: KubeRay takes one per cluster, and two run during an update."""
    cluster = one(rendered(name), "RayService")["spec"]["rayClusterConfig"]
    options = cluster.get("gcsFaultToleranceOptions", {})
    assert options.get("redisAddress") == address
    assert options.get("redisUsername", {}).get("value") == user
    reference = options.get("redisPassword", {}).get("valueFrom", {}).get("secretKeyRef", {})
    assert (reference.get("name"), reference.get("key")) == (secret or (None, None))
    assert "externalStorageNamespace" not in options


@ALL_SETS
def test_the_grace_period_of_gateways_covers_their_drain(rendered, name):
    manifests = rendered(name)
    gateway = load_settings(environ=process_environment(manifests, "gateway")).gateway
    pod = one(manifests, "Deployment", "-gateway")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == math.ceil(gateway.shutdown_s) + 15


def test_keys_reach_the_gateway(rendered):
    gateway = load_settings(environ=process_environment(rendered("secrets_given"), "gateway"))
    assert (gateway.gateway.api_key, gateway.gateway.admin_key) == (API_KEY, ADMIN_KEY)
    assert gateway.secret == POOL_SECRET
    gateway = load_settings(environ=process_environment(rendered("defaults"), "gateway"))
    assert gateway.gateway.api_key == ""
    assert len(gateway.gateway.admin_key) == 40
    manifests = rendered("secrets_of_the_user")
    gateway = load_settings(environ=process_environment(manifests, "gateway"))
    assert gateway.gateway.api_key == "user-api-key"
    assert not [each for each in manifests if each["kind"] == "Secret"]


def test_secret_values_are_in_secrets_alone(helm, tmp_path):
    values = VALUE_SETS["secrets_given"] | {"networkPolicy": {"enabled": True}}
    manifests = render(helm, tmp_path, values)
    for secret in (POOL_SECRET, VALKEY_PASSWORD, API_KEY, ADMIN_KEY):
        encoded = base64.b64encode(secret.encode()).decode()
        texts = {str(each): each["kind"] for each in manifests}
        shown = {secret, repr(secret)[1:-1], encoded}
        holders = {kind for text, kind in texts.items() if any(each in text for each in shown)}
        assert holders == {"Secret"}
