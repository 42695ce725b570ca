"""A pool of embedders in the actors of a Ray cluster.

    pool = RayEmbedderPool(encode, workers=4, gpus_per_worker=0.25)    # encode: texts -> [N, D]
    embeddings = pool(texts, groups=8)                                 # eight consecutive texts belong to one prompt
    pool.close()                                                       # or contextlib.closing(pool)

In a recipe: `algorithm: {similarity: {workers: 4, gpus_per_worker: 0.25}}`.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_trainer.messages import require_package

_OP = "RayEmbedderPool"
BATCH = 64  # texts per call of the encoder; a prompt with more is not split
RETRIES = 2  # how often a batch is repeated after its actor died
PLACE_SECONDS = 300.0  # that the cluster has to place the actors


class EmbedderError(RuntimeError):
    """The embedder failed, or its actors cannot be placed; the message says which and why."""


def check_ray(where: str) -> None:
    """Raises if Ray is not installed, or if nothing listens at the host:port of RAY_ADDRESS; errors name `where`."""
    require_package(where, "ray", "ray")
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return  # the caller has chosen a cluster
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        return
    try:  # Ray would wait for minutes
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise EmbedderError(f"{where}: a Ray cluster must answer at RAY_ADDRESS, {address!r}, got {error}") from None


class RayEmbedderPool:
    """A callable texts -> [N, D] that runs in Ray actors, which start at the first call or with `start()`.

    The batches follow from the texts alone, not from the number of workers or from which of them is idle. Ray restarts
    an actor that dies and repeats its batch.

    Args:
        encode: picklable callable texts -> [N, D]; models that it loads lazily are loaded in each actor.
        workers: number of actors.
        gpus_per_worker: GPUs per actor; a fraction places several actors on one GPU.
    """

    def __init__(self, encode: Callable[[Sequence[str]], Any], workers: int, *, gpus_per_worker: float = 0.0) -> None:
        if workers < 1:
            raise ValueError(f"{_OP}: workers must be positive, got {workers!r}")
        self.encode, self.workers = encode, workers
        self.resources = {"num_cpus": 1.0, "num_gpus": gpus_per_worker}  # per actor
        self.actors: list[Any] = []
        self._processes: set[str] = set()
        self._started_ray = False

    @property
    def restarts(self) -> int:
        """Number of actors that died and returned vectors again."""
        return max(0, len(self._processes) - self.workers)

    def start(self) -> None:
        """Places the actors; if that fails, the error names the requested and the available resources."""
        if self.actors:
            return
        check_ray(_OP)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        if not ray.is_initialized():
            options: Any = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.WARNING}
            ray.init(**options)
            self._started_ray = True
        remote: Any = ray.remote(max_restarts=-1, max_task_retries=RETRIES, **self.resources)  # type: ignore[call-overload]
        try:
            self.actors = [remote(_Worker).remote(self.encode) for _ in range(self.workers)]
            pending = [actor.encode.remote([]) for actor in self.actors]
            placed, missing = ray.wait(pending, num_returns=len(pending), timeout=PLACE_SECONDS)
            if missing:
                total, free = ray.cluster_resources(), ray.available_resources()
                there = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
                raise EmbedderError(
                    f"{_OP}: the cluster must place {len(pending)} actors of {self.resources} within "
                    f"{PLACE_SECONDS:g} s, got {len(placed)}; {there} are free"
                )
            self._processes = {process for process, _ in ray.get(placed)}
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stops the actors, and Ray if the pool started it. A later call starts them again."""
        if not self.actors and not self._started_ray:
            return
        import ray

        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False

    def __call__(self, texts: Sequence[str], groups: int | Sequence[int] = 1) -> Tensor:
        """Embeds texts.

        Args:
            texts: the texts; those of one prompt are consecutive.
            groups: texts per prompt, one number for all or one for each. A prompt's texts go to one actor in one call.

        Returns:
            Embeddings [N, D] in the order of the texts.
        """
        ranges = batch_ranges(len(texts), groups, BATCH)
        if not ranges:
            raise ValueError(f"{_OP}: texts must not be empty")
        self.start()
        from ray.util import ActorPool

        batches = [list(texts[start:end]) for start, end in ranges]
        results = ActorPool(self.actors).map(lambda actor, batch: actor.encode.remote(batch), batches)
        return torch.cat([self._next(results, batch) for batch in batches])

    def _next(self, results: Any, batch: list[str]) -> Tensor:
        """The embeddings of the next batch; errors name its texts."""
        from ray.exceptions import RayActorError, RayTaskError

        where = f"for {len(batch)} texts, the first {batch[0][:80]!r}"
        try:
            process, result = next(results)
        except RayActorError as error:
            reason = str(error).strip().splitlines()[0]
            rule = f"an actor must live for one of {RETRIES + 1} tries, got none"
            raise EmbedderError(f"{_OP}: {rule} {where}: {reason}") from error
        except RayTaskError as error:
            cause = error.cause or error
            raise EmbedderError(f"{_OP}: encode raised {type(cause).__name__} {where}: {cause}") from error
        self._processes.add(process)
        return checked_vectors(f"{_OP}: encode", result, len(batch), where)


def checked_vectors(name: str, result: Any, count: int, where: str) -> Tensor:
    """The embeddings that an encoder returned; raises unless there is one for each text."""
    vectors = torch.as_tensor(result)
    if vectors.dim() != 2 or len(vectors) != count:
        raise EmbedderError(f"{name} must return [{count}, D] {where}, got {list(vectors.shape)}")
    return vectors


class _Worker:
    """Runs the encoder in a Ray actor."""

    def __init__(self, encode: Callable[[Sequence[str]], Any]) -> None:
        self._encode = encode

    def encode(self, texts: list[str]) -> tuple[str, Any]:
        """The process on its machine, another one after each restart, and the embeddings; no texts: None."""
        embeddings = self._encode(texts) if texts else None
        process = f"{socket.gethostname()} {os.getpid()}"
        return process, embeddings.detach().cpu() if isinstance(embeddings, Tensor) else embeddings


def batch_ranges(count: int, groups: int | Sequence[int], size: int) -> list[tuple[int, int]]:
    """Start and end of each batch: as many whole groups as fit into `size` texts, and at least one."""
    sizes = [groups] * (count // max(groups, 1)) if isinstance(groups, int) else groups
    if sum(sizes) != count or min(sizes, default=1) < 0:
        raise ValueError(f"{_OP}: groups must divide {count} texts, or be sizes with that sum, got {groups}")
    ranges: list[tuple[int, int]] = []
    start = end = 0
    for group_size in sizes:
        if end > start and end + group_size - start > size:
            ranges.append((start, end))
            start = end
        end += group_size
    return [*ranges, (start, end)] if end > start else ranges
