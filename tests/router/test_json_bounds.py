"""Bodies of too many values are refused before they are decoded."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.protocol import RequestError
from router import json_bounds
from router.json_bounds import CONTAINERS_PER_MESSAGE, check_json_size


def containers(value) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(containers, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(containers, value))
    return 0


texts = st.text(st.sampled_from('a{[]},:"\\\n\u00e9'), max_size=12)
values = st.recursive(
    st.none() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=30,
)


@given(values)
def test_objects_and_arrays_are_counted_whatever_stands_in_strings(value):
    body = msgspec.json.encode(value)
    if containers(value) > CONTAINERS_PER_MESSAGE:
        with pytest.raises(RequestError, match=f"holds {containers(value)} objects") as refusal:
            check_json_size(body, 1)
        assert refusal.value.status == 400
    else:
        check_json_size(body, 1)


def test_text_of_braces_quotes_and_commas_is_no_value(monkeypatch):
    monkeypatch.setattr(json_bounds, "MAX_STRINGS", 5)
    monkeypatch.setattr(json_bounds, "MAX_VALUES", 5)
    check_json_size(msgspec.json.encode({"prompt": '{[",\\"' * 100}), 1)


@pytest.mark.parametrize(
    ("value", "words"),
    [(["x"] * 6, "6 strings: send at most 5"), ([1] * 7, "more than 5 values")],
)
def test_strings_and_values_are_bounded(monkeypatch, value, words):
    monkeypatch.setattr(json_bounds, "MAX_STRINGS", 5)
    monkeypatch.setattr(json_bounds, "MAX_VALUES", 5)
    with pytest.raises(RequestError, match=words):
        check_json_size(msgspec.json.encode(value), 1)
    check_json_size(msgspec.json.encode(value[:5]), 1)
