"""New weights for a running engine, read from files while it computes with the old ones."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import torch

from cluster.settings import WorkerSettings
from worker.build import of_weights
from worker.engine import EngineCore
from worker.messages import EngineInfo, Output
from worker.models import LlamaModel, ModelError
from worker.runner import TorchRunner
from worker.tiers.opening import open_folder
from worker.weights import LoadedModel, load_model

log = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """A model in host memory, ready to be copied to the device."""

    loaded: LoadedModel
    model: LlamaModel


class WeightChange:
    """One change of weights: `prepare` in a thread of its own, then `apply` between two steps."""

    def __init__(self, core: EngineCore, info: EngineInfo, settings: WorkerSettings) -> None:
        """Raises ModelError if the engine has no weights."""
        if not isinstance(core.runner, TorchRunner):
            raise ModelError("this worker is emulated and has no weights to replace")
        self._core = core
        self._info = info
        self._settings = settings
        self._model = core.runner.model

    def prepare(self, path: str) -> Future[Prepared]:
        """Load the model at `path`. The future fails with ModelError if it cannot replace the
        current one."""
        executor = ThreadPoolExecutor(1, thread_name_prefix="new-weights")
        future = executor.submit(self._prepare, path)
        executor.shutdown(wait=False)
        return future

    def apply(self, prepared: Prepared) -> tuple[EngineInfo, list[Output]]:
        """Switch to the new weights.

        Returns the new description of the engine, and error outputs for the requests that had not
        ended. The model keeps the name under which it is served.
        """
        outputs = self._core.fail_all(
            "the weights were replaced while this request ran; send it again"
        )
        self._core.forget_model(prepared.loaded.eos_token_ids)
        with torch.inference_mode():
            self._model.adopt(prepared.model)
        fields = of_weights(prepared.loaded, self._model.dtype, self._settings.block_size)
        return (
            msgspec.structs.replace(
                self._info, model=msgspec.structs.replace(self._info.model, **fields)
            ),
            outputs,
        )

    def open_disk(self, info: EngineInfo) -> None:
        """Open the disk tier of the new namespace; its blocks are announced next.

        If that fails, the worker continues without one.
        """
        core = self._core
        if core.tiers is None or not isinstance(core.runner, TorchRunner):
            return
        try:
            folder, blocks = open_folder(self._settings, core.runner, info.model.namespace)
        except OSError as error:
            log.warning("continuing without a disk tier: %s", error)
            folder, blocks = None, 0
        core.tiers.use_folder(folder, blocks)

    def _prepare(self, path: str) -> Prepared:
        mine = self._model.config
        loaded = load_model(path, self._model.dtype, self._settings.cache_dir)
        differing = [
            f"{name} is {getattr(loaded.config, name)!r} instead of {getattr(mine, name)!r}"
            for name in mine.__struct_fields__
            if getattr(loaded.config, name) != getattr(mine, name)
        ]
        if differing:
            raise ModelError(
                f"the model at {path} has another architecture: {'; '.join(differing)}. Start a "
                "worker with it instead"
            )
        model = LlamaModel(
            loaded.config, loaded.tensors, self._model.dtype, "cpu", self._model.device
        )
        return Prepared(loaded, model)
