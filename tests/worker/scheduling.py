"""What the tests of the scheduler share."""


def shapes(rig):
    """For each step so far: {request: (start, tokens, sampled)}."""
    return [
        {item.request_id: (item.start, len(item.token_ids), item.sample) for item in batch}
        for batch in rig.runner.batches
    ]


def last(rig):
    return shapes(rig)[-1]


def prompt_of(length, first=1):
    return [first] + [2] * (length - 1)


class Counting(list):
    """A list that counts how often it is looked into."""

    looks = 0

    def __getitem__(self, index):
        self.looks += 1
        return super().__getitem__(index)
