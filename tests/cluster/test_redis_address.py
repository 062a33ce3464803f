"""Redis URLs: what they mean, and that no message has a part of a password in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.redis_address import RedisAddressError, parse_redis_url, with_password
from cluster.settings import SettingsError, load_settings


@pytest.mark.parametrize(
    ("url", "hosts", "service", "options", "shown"),
    [
        ("redis://h", (("h", 6379),), "", {}, "redis://h:6379"),
        (
            "redis://u:p@h:1/2",
            (("h", 1),),
            "",
            {"username": "u", "password": "p", "db": 2},
            "redis://h:1/2",
        ),
        ("redis://:a%2Fb%40@h", (("h", 6379),), "", {"password": "a/b@"}, "redis://h:6379"),
        ("redis://:a@b:c@h", (("h", 6379),), "", {"password": "a@b:c"}, "redis://h:6379"),
        ("redis://[::1]:5", (("::1", 5),), "", {}, "redis://[::1]:5"),
        ("redis://a:1,b:2", (("a", 1), ("b", 2)), "", {}, "redis://a:1,b:2"),
        ("rediss://h?protocol=2", (("h", 6379),), "", {"protocol": 2}, "rediss://h:6379"),
        (
            "rediss://h?ssl_cert_reqs=none",
            (("h", 6379),),
            "",
            {"ssl_cert_reqs": "none"},
            "rediss://h:6379",
        ),
        (
            "unix://:p%2Fw@/run/redis.sock?db=3",
            (),
            "",
            {"password": "p/w", "db": 3, "path": "/run/redis.sock"},
            "unix:///run/redis.sock",
        ),
        (
            "redis+sentinel://:p@a,b:2/main/3",
            (("a", 26379), ("b", 2)),
            "main",
            {"password": "p", "db": 3},
            "redis+sentinel://a:26379,b:2/main/3",
        ),
    ],
)
def test_what_a_url_means(
    url: str, hosts: object, service: str, options: dict[str, object], shown: str
) -> None:
    address = parse_redis_url(url)
    assert (address.hosts, address.service, address.options) == (hosts, service, options)
    assert address.shown == shown
    assert address.tls == url.startswith("rediss")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://:zyx/ret@h:6399/0", "percent-encode"),
        ("redis://:zyx?ret@h", "percent-encode"),
        ("redis://zyx#ret:p@h", "percent-encode"),
        ("redis://:zyx", "not a number"),
        ("redis://h/zyx", "number of a database"),
        ("redis+sentinel://:zyx@h", "SERVICE"),
        ("zyx@h:6379", "begins with one of"),
        ("redis://h?socket_timeout=zyx", "no valid value"),
        ("redis://h?zyx=1", "unknown; known are"),
        ("redis://h?decode_responses=true", "unknown; known are"),  # replies must be bytes
        ("redis://h?ssl_cert_reqs=none", "unknown; known are"),  # without TLS
        ("unix://:zyx/ret@/run/redis.sock", "percent-encode"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_showing_it(url: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as refused:
        load_settings(environ={"STEMROUTE_REDIS_URL": url})
    assert "zyx" not in str(refused.value)
    assert "STEMROUTE_REDIS_URL" in str(refused.value)
    assert refused.value.__cause__ is None


@given(st.text(min_size=1), st.sampled_from(["redis://h:1/2", "redis://u:old@h:1,i/2?protocol=2"]))
def test_a_password_of_any_characters_survives(password: str, url: str) -> None:
    before, after = parse_redis_url(url), parse_redis_url(with_password(url, password))
    assert after.options == before.options | {"password": password}
    assert (after.hosts, after.shown) == (before.hosts, before.shown)


def test_the_password_of_the_environment_goes_into_the_url() -> None:
    environ = {"STEMROUTE_REDIS_URL": "redis://h/0", "STEMROUTE_REDIS_PASSWORD": "a/b"}
    settings = load_settings(environ=environ)
    assert settings.redis_url == "redis://:a%2Fb@h/0"
    assert settings.redis_password == ""


def test_other_schemes_are_refused() -> None:
    with pytest.raises(RedisAddressError):
        parse_redis_url("http://h")
