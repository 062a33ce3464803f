"""A fleet with a clock, and what tests ask of it."""

from tests.router.support import chain_of

PROMPT = 40
CHAIN = chain_of(range(PROMPT))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ask(fleet, chain=CHAIN, prompt=PROMPT, excluded=()):
    return fleet.candidates("tiny", chain, prompt, excluded)


def hits(fleet, **kwargs):
    found = ask(fleet, **kwargs)
    names = [fleet.at(int(slot)).card.worker for slot in found.columns.slots]
    return dict(zip(names, found.hit_tokens.tolist(), strict=True))


def names(fleet, **kwargs):
    found = ask(fleet, **kwargs)
    return set() if found is None else {fleet.at(int(s)).card.worker for s in found.columns.slots}


def slot_of(fleet, worker):
    return next(m.slot for m in fleet.members() if m.card.worker == worker)
