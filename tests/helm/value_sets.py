"""Values as different users would give them. Each must render to valid manifests."""

from __future__ import annotations

from typing import Any

POOL_SECRET = "pool-secret-of-the-test"
VALKEY_PASSWORD = "valkey/password 'of' $the@test\"\\n"
API_KEY = "api-key-of-the-test"
ADMIN_KEY = "admin-key-of-the-test"

VALUE_SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "external_redis_with_password": {
        "valkey": {"enabled": False},
        "externalRedis": {
            "url": "rediss://stem@redis.example.com:6380/2",
            "existingSecret": "redis-login",
            "passwordKey": "password",
        },
        "ray": {"gcsFaultTolerance": {"enabled": True}},
    },
    "external_redis_url_from_secret": {
        "valkey": {"enabled": False},
        "externalRedis": {"existingSecret": "redis-login", "urlKey": "url"},
        "ray": {"gcsFaultTolerance": {"enabled": True, "redisAddress": "redis.example.com:6379"}},
    },
    "external_redis_without_password": {
        "valkey": {"enabled": False},
        "externalRedis": {"url": "redis://redis.example.com/0"},
        "ray": {"gcsFaultTolerance": {"enabled": True}},
    },
    "gpu_with_existing_claim": {
        "imagePullSecrets": [{"name": "registry-login"}],
        "commonLabels": {"team": "inference"},
        "bus": {"lease_s": 5, "min_report_gap_s": 0.05, "stream_max_reports": 1_000_000},
        "model": {
            "path": "/models/llama-3-8b",
            "servedName": "llama-3-8b",
            "volume": {"existingClaim": "models"},
        },
        "worker": {
            "replicas": 4,
            "gpus": 1,
            "cpus": 7.5,
            "resources": {
                "requests": {"cpu": 8, "memory": "64Gi"},
                "limits": {"memory": "96Gi", "rdma/hca": 1},
            },
            "shmSize": "16Gi",
            "settings": {
                "dtype": "bfloat16",
                "token_budget": 2_097_152,
                "kv_memory_share": 0.9,
                "context_tokens": 131_072,
            },
            "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
            "runtimeClassName": "nvidia",
            "nodeSelector": {"gpu": "h200"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "affinity": {
                "podAntiAffinity": {
                    "preferredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "weight": 1,
                            "podAffinityTerm": {
                                "topologyKey": "kubernetes.io/hostname",
                                "labelSelector": {"matchLabels": {"team": "inference"}},
                            },
                        }
                    ]
                }
            },
            "initContainers": [
                {"name": "warm", "image": "busybox", "command": ["ls", "/models"]},
            ],
            "startupProbe": {
                "httpGet": {"path": "/health", "port": "worker"},
                "periodSeconds": 10,
                "failureThreshold": 360,
            },
            "podLabels": {"tier": "gpu"},
            "podAnnotations": {"example.com/scrape": "true"},
            "additionalGroups": [
                {
                    "name": "h100",
                    "replicas": 2,
                    "nodeSelector": {"gpu": "h100"},
                    "tolerations": [{"key": "h100", "operator": "Exists"}],
                    "resources": {"limits": {"memory": "64Gi"}},
                    "shmSize": "8Gi",
                }
            ],
        },
        "ray": {"authMode": "token", "head": {"nodeSelector": {"pool": "cpu"}}},
    },
    "download_to_new_claim": {
        "model": {
            "servedName": "qwen",
            "huggingface": {
                "repo": "Qwen/Qwen3-8B",
                "revision": "0123456",
                "tokenSecret": "hub-login",
            },
            "volume": {"create": {"enabled": True, "storageClass": "fast", "size": "40Gi"}},
        },
        "worker": {
            "env": [
                {"name": "HF_ENDPOINT", "value": "https://hub.example.com"},
                {"name": "HTTPS_PROXY", "value": "http://proxy.example.com:3128"},
            ],
            "envFrom": [{"secretRef": {"name": "hub-settings"}}],
        },
        "valkey": {"persistence": {"enabled": True, "storageClass": "fast"}},
        "ray": {"gcsFaultTolerance": {"enabled": True}},
        "networkPolicy": {"enabled": True},
    },
    "download_to_each_pod": {"model": {"huggingface": {"repo": "Qwen/Qwen3-8B"}}},
    "model_on_nfs": {
        "model": {
            "path": "/models/a",
            "volume": {"source": {"nfs": {"server": "nfs.example.com", "path": "/a"}}},
        },
    },
    "emulated_without_gpu": {
        "model": {"path": "emulated:steady-25ms"},
        "worker": {"gpus": 0, "cpus": 1, "replicas": 8},
    },
    "everything_scales_and_is_watched": {
        "worker": {
            "autoscaling": {"enabled": True, "minReplicas": 2, "maxReplicas": 12},
            "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
            "additionalGroups": [{"name": "spare", "replicas": 1}],
        },
        "gateway": {
            "policy": "consistent_hash:bound=1.25",
            "settings": {
                "max_body_bytes": 16_777_216,
                "connect_timeout_s": 0.5,
                "attempts": 2,
                "drain_notice_s": 0.5,
                "drain_timeout_s": 600,
            },
            "extraArgs": ["--policy", "locality"],
            "autoscaling": {
                "enabled": True,
                "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
            },
            "podDisruptionBudget": {"minAvailable": "50%"},
            "ingress": {
                "enabled": True,
                "className": "nginx",
                "annotations": {"nginx.ingress.kubernetes.io/proxy-buffering": "off"},
                "hosts": [{"host": "llm.example.com"}],
                "tls": [{"secretName": "llm-tls", "hosts": ["llm.example.com"]}],
            },
            "httpRoute": {
                "enabled": True,
                "parentRefs": [{"name": "edge", "namespace": "infra", "sectionName": "https"}],
                "hostnames": ["llm.example.com"],
            },
            "serviceMonitor": {
                "enabled": True,
                "labels": {"release": "prometheus"},
                "scrapeTimeout": "10s",
            },
            "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
            "service": {"type": "LoadBalancer", "loadBalancerSourceRanges": ["10.0.0.0/8"]},
        },
        "networkPolicy": {
            "enabled": True,
            "gatewayFrom": [{"namespaceSelector": {"matchLabels": {"apps": "yes"}}}],
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}],
        },
    },
    "secrets_given": {
        "poolSecret": {"value": POOL_SECRET},
        "valkey": {"auth": {"value": VALKEY_PASSWORD}},
        "gateway": {"apiKey": {"value": API_KEY}, "adminKey": {"value": ADMIN_KEY}},
    },
    "secrets_of_the_user": {
        "serviceAccount": {"create": False, "name": "restricted"},
        "poolSecret": {"existingSecret": "mine", "key": "pool"},
        "valkey": {"auth": {"existingSecret": "mine", "key": "valkey"}},
        "gateway": {
            "apiKey": {"existingSecret": "mine", "key": "api"},
            "adminKey": {"existingSecret": "mine", "key": "admin"},
        },
    },
    "extra_objects": {
        "fullnameOverride": "stem",
        "pool": "shared",
        "extraObjects": [
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": '{{ include "stemroute.fullname" . }}-extra'},
                "data": {"pool": '{{ include "stemroute.pool" . }}'},
            },
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": "second"},
                "data": {"a": "b"},
            },
        ],
    },
}
