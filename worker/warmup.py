"""Warm-up: prompts computed, cached and pinned before the worker reports that it is ready."""

from __future__ import annotations

import logging
from pathlib import Path

from tokenizers import Tokenizer

from cluster.blocks import pack_tokens
from cluster.protocol import ModelInfo, Sampling
from worker.engine_client import EngineClient
from worker.messages import EngineRequest

log = logging.getLogger(__name__)

SEPARATOR = "---"


class WarmupError(ValueError):
    """A warm-up file that cannot be used. The message names it and says what to change."""


def read_prompts(path: str) -> list[str]:
    """The prompts of a UTF-8 text file, separated by lines of `---`.

    A prompt is the text as the model sees it, so write a system prompt as the chat template renders
    it. Line ends around separators are not part of a prompt. Raises WarmupError.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WarmupError(f"cannot read the warm-up file {path}: {error}") from error
    prompts: list[list[str]] = [[]]
    for line in lines:
        if line.strip() == SEPARATOR:
            prompts.append([])
        else:
            prompts[-1].append(line)
    texts = ["\n".join(prompt).strip("\n") for prompt in prompts]
    texts = [text for text in texts if text]
    if not texts:
        raise WarmupError(f"the warm-up file {path} holds no prompt")
    return texts


async def warm_up(engine: EngineClient, model: ModelInfo, secret: bytes, path: str) -> None:
    """Compute every prompt of the file and pin its blocks, up to the limit of pins.

    The prompts are of the shared namespace: no adapter, no tenant. Raises WarmupError for an
    unusable file or prompt, EngineDead if the engine ends.
    """
    tokenizer = Tokenizer.from_str(model.tokenizer_json)
    root = model.namespace.root(secret)
    tokens = pinned = 0
    prompts = read_prompts(path)
    for number, text in enumerate(prompts, start=1):
        ids = tokenizer.encode(text, add_special_tokens=model.add_bos).ids
        if len(ids) >= model.context_tokens:
            raise WarmupError(
                f"prompt {number} of the warm-up file {path} has {len(ids)} tokens; this worker "
                f"takes {model.context_tokens - 1} at most. Shorten it"
            )
        request = EngineRequest(
            request_id=f"warmup-{number}",
            token_ids=pack_tokens(ids),
            namespace_root=root,
            sampling=Sampling(max_tokens=1, temperature=0.0, ignore_eos=True),
            request_type="warmup",
        )
        async for output in engine.generate(request):
            if output.error:
                raise WarmupError(f"prompt {number} of {path} cannot be computed: {output.error}")
        tokens += len(ids)
        pinned += await engine.pin(root, request.token_ids)
    log.info("warmed up %d prompts, %d tokens, %d of them pinned", len(prompts), tokens, pinned)
