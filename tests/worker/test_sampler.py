"""Sampling: the right distribution, and a draw that depends on its own row alone."""

import math

import numpy as np
import pytest
import torch

from cluster.protocol import Sampling
from worker import sampler
from worker.batch import NOT_FINITE
from worker.sampler import Draw, uniform


def sample(logits, draws):
    return sampler.sample(logits, draws, logits.argmax(dim=-1)).tolist()


def drawing(output_index=0, **fields):
    return Draw(Sampling(**{"max_tokens": 1, "seed": 7, **fields}), output_index)


def logits_of_shape(rows, vocabulary, seed=0, scale=2.0):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


def frequencies(logits, count=6000, **fields):
    """How often each token of one row of logits is drawn, over output indices."""
    rows = logits[None].expand(count, -1)
    tokens = sample(rows, [drawing(index, **fields) for index in range(count)])
    return np.bincount(tokens, minlength=len(logits)) / count


def assert_close_to(observed, expected, count=6000):
    deviation = np.sqrt(expected * (1 - expected) / count)
    assert np.all(np.abs(observed - expected) <= 4.5 * deviation + 1e-12)


def test_greedy_takes_the_greatest_and_does_nothing_else(monkeypatch):
    monkeypatch.setattr(sampler, "_draw", lambda *_: pytest.fail("a greedy row was drawn"))
    logits = logits_of_shape(5, 50)
    greedy = [drawing(temperature=0.0, seed=None, top_p=0.3, top_k=3)] * 5
    assert sample(logits, greedy) == logits.argmax(dim=1).tolist()


def test_only_random_rows_are_drawn(monkeypatch):
    drawn = []
    draw = sampler._draw
    monkeypatch.setattr(
        sampler, "_draw", lambda logits, draws: (drawn.append(len(draws)), draw(logits, draws))[1]
    )
    logits = logits_of_shape(4, 50)
    tokens = sample(logits, [drawing(temperature=0.0)] * 3 + [drawing(temperature=1.0)])
    assert drawn == [1]
    assert tokens[:3] == logits[:3].argmax(dim=1).tolist()


def test_frequencies_are_the_softmax_at_the_temperature():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])
    for temperature in (0.5, 1.0, 2.0):
        expected = (logits.double() / temperature).softmax(0).numpy()
        assert_close_to(frequencies(logits, temperature=temperature), expected)


def test_top_k_keeps_the_k_likeliest_and_their_proportions():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])
    expected = logits.double().softmax(0).numpy()
    expected[[2, 3, 5]] = 0
    assert_close_to(frequencies(logits, top_k=3), expected / expected.sum())


def test_top_p_keeps_the_smallest_set_that_reaches_its_share():
    probabilities = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])
    expected = np.array([0, 0.4, 0, 0.3, 0.15]) / 0.85
    assert_close_to(frequencies(probabilities.log(), top_p=0.75), expected)
    expected = np.array([0, 0.4, 0, 0.3, 0]) / 0.7
    assert_close_to(frequencies(probabilities.log(), top_p=0.65), expected)


def test_top_p_is_a_share_of_what_top_k_left():
    probabilities = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])
    # Of the two likeliest, 0.4 / 0.7 = 0.57 reaches 0.55 alone.
    assert_close_to(frequencies(probabilities.log(), top_k=2, top_p=0.55), np.eye(5)[1])


def test_the_narrowest_choices_are_greedy():
    logits = logits_of_shape(20, 300)
    best = logits.argmax(dim=1).tolist()
    assert sample(logits, [drawing(index, top_k=1) for index in range(20)]) == best
    assert sample(logits, [drawing(index, top_p=1e-9) for index in range(20)]) == best
    assert sample(logits, [drawing(index, top_p=0.0) for index in range(20)]) == best
    assert sample(logits, [drawing(index, temperature=1e-4) for index in range(20)]) == best


def test_a_token_does_not_depend_on_its_batch():
    """Alone, beside others of every kind, in another place: the same token."""
    logits = logits_of_shape(6, 2000, scale=0.5)
    kinds = [
        {"temperature": 0.8},
        {"top_k": 40},
        {"top_p": 0.9},
        {"top_p": 0.05},
        {"top_k": 5000, "top_p": 0.999, "temperature": 3.0},
        {"temperature": 0.0},
    ]
    draws = [drawing(index, seed=100 + index, **kind) for index, kind in enumerate(kinds)]
    alone = [sample(logits[index : index + 1], [draw])[0] for index, draw in enumerate(draws)]
    assert sample(logits, draws) == alone
    order = [5, 2, 0, 4, 1, 3]
    shuffled = sample(logits[order], [draws[index] for index in order])
    assert shuffled == [alone[index] for index in order]


def test_a_large_nucleus_gives_the_same_tokens_as_sorting_everything(monkeypatch):
    """A flat distribution: its nucleus is wider than the candidates looked at first."""
    logits = logits_of_shape(30, 3000, scale=0.1)
    draws = [drawing(index, top_p=0.9 if index % 2 else 0.01) for index in range(30)]
    tokens = sample(logits, draws)
    monkeypatch.setattr(sampler, "NUCLEUS_CANDIDATES", 3000)
    assert sample(logits, draws) == tokens
    ranks = logits.argsort(dim=1, descending=True).argsort(dim=1)
    assert max(int(ranks[row, token]) for row, token in enumerate(tokens)) > 1000


def test_seed_and_output_index_decide_the_draw():
    logits = logits_of_shape(1, 1000, scale=0.1).expand(50, -1)
    by_index = sample(logits, [drawing(index) for index in range(50)])
    assert by_index == sample(logits, [drawing(index) for index in range(50)])
    assert len(set(by_index)) > 40
    by_seed = sample(logits, [drawing(0, seed=seed) for seed in range(50)])
    assert len(set(by_seed)) > 40


def test_the_uniform_number_is_the_same_everywhere():
    numbers = [uniform(seed, index) for seed in (-1, 0, 2**70) for index in range(1000)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == len(numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 4.5 / math.sqrt(12 * len(numbers))
    assert uniform(1, 23) != uniform(12, 3)
    assert uniform(7, 0) == 0.8892224361166634


def test_tokens_that_are_impossible_are_never_drawn():
    logits = torch.full((200, 50), -math.inf)
    logits[:, 17] = 3.0
    logits[:, 31] = 3.0
    tokens = sample(logits, [drawing(index, top_p=0.99) for index in range(200)])
    assert set(tokens) == {17, 31}


def test_a_random_draw_without_a_seed_is_refused():
    with pytest.raises(ValueError, match="needs a seed"):
        sample(logits_of_shape(1, 10), [drawing(seed=None)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_row_that_is_not_finite_gives_no_token_and_leaves_the_others_alone(temperature, wrong):
    logits = logits_of_shape(4, 50)
    draws = [drawing(index, temperature=temperature, top_p=0.9) for index in range(4)]
    expected = sample(logits, draws)
    logits[2, 17] = wrong
    assert sample(logits, draws) == [*expected[:2], NOT_FINITE, expected[3]]


def test_a_row_may_rule_tokens_out_but_not_all():
    logits = logits_of_shape(2, 50)
    logits[0, 1:] = -math.inf
    logits[1] = -math.inf
    assert sample(logits, [drawing(), drawing()]) == [0, NOT_FINITE]
