"""A pool of embedders in the actors of a Ray cluster.

    pool = RayEmbedderPool(encode, workers=4, gpus_per_worker=0.25)    # encode: texts -> [N, D]
    embeddings = pool(texts, groups=8)                                 # eight consecutive texts belong to one prompt
    pool.close()                                                       # or `with RayEmbedderPool(...) as pool:`

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


class EmbedderError(RuntimeError):
    """The embedder failed, or its actors cannot be placed; the message says which and why."""


def check_ray(where: str, address: str | None = None) -> None:
    """Raises if Ray is not installed, or if nothing listens at the cluster's host:port.

    Args:
        where: key or class that needs it.
        address: as in RayEmbedderPool.
    """
    require_package(where, "ray", "ray")
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        return  # the caller has chosen a cluster
    address = address or os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "://" in address:
        return
    try:  # Ray would wait for minutes
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise EmbedderError(
            f"{where}: a Ray cluster must answer at {address!r}, the address or RAY_ADDRESS, got {error}"
        ) from None


class RayEmbedderPool:
    """A callable texts -> [N, D] that runs in Ray actors, which start at the first call or with `start()`.

    The batches follow from the texts alone, not from the number of workers or from which of them is idle. Ray restarts
    an actor that dies and repeats its batch.

    Args:
        encode: picklable callable texts -> [N, D]; models that it loads lazily are loaded in each actor.
        workers: number of actors.
        gpus_per_worker: GPUs per actor; a fraction places several actors on one GPU.
        cpus_per_worker: CPUs per actor.
        batch: texts per call of `encode`; a prompt with more texts is not split.
        retries: how often a batch is repeated after its actor died.
        timeout: seconds that the cluster has to place the actors.
        address: cluster address for `ray.init`; None uses RAY_ADDRESS, or starts Ray on this machine.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[str]], Any],
        workers: int,
        *,
        gpus_per_worker: float = 0.0,
        cpus_per_worker: float = 1.0,
        batch: int = 64,
        retries: int = 2,
        timeout: float = 300.0,
        address: str | None = None,
    ) -> None:
        for name, value, is_valid, rule in (
            ("encode", encode, callable(encode), "be callable"),
            ("workers", workers, workers > 0, "be positive"),
            ("batch", batch, batch > 0, "be positive"),
            ("retries", retries, retries >= 0, "not be negative"),
            ("gpus_per_worker", gpus_per_worker, gpus_per_worker >= 0, "not be negative"),
            ("cpus_per_worker", cpus_per_worker, cpus_per_worker >= 0, "not be negative"),
            ("timeout", timeout, timeout > 0, "be positive"),
        ):
            if not is_valid:
                raise ValueError(f"{_OP}: {name} must {rule}, got {value!r}")
        self.encode, self.workers, self.batch, self.retries = encode, workers, batch, retries
        self.timeout, self.address = timeout, address
        self.resources = {"num_cpus": cpus_per_worker, "num_gpus": gpus_per_worker}  # per actor
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
        check_ray(_OP, self.address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        if not ray.is_initialized():
            options: Any = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.WARNING}
            ray.init(address=self.address, **options)
            self._started_ray = True
        remote: Any = ray.remote(max_restarts=-1, max_task_retries=self.retries, **self.resources)  # type: ignore[call-overload]
        try:
            self.actors = [remote(_Worker).remote(self.encode) for _ in range(self.workers)]
            pending = [actor.process.remote() for actor in self.actors]
            placed, missing = ray.wait(pending, num_returns=len(pending), timeout=self.timeout)
            if missing:
                total, free = ray.cluster_resources(), ray.available_resources()
                there = ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
                raise EmbedderError(
                    f"{_OP}: the cluster must place {len(pending)} actors of {self.resources} within "
                    f"{self.timeout:g} s, got {len(placed)}; {there} are free"
                )
            self._processes = set(ray.get(placed))
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

    def __enter__(self) -> RayEmbedderPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, texts: Sequence[str], groups: int | Sequence[int] = 1) -> Tensor:
        """Embeds texts.

        Args:
            texts: the texts; those of one prompt are consecutive.
            groups: texts per prompt, one number for all or one for each. A prompt's texts go to one actor in one call.

        Returns:
            Embeddings [N, D] in the order of the texts.
        """
        ranges = batch_ranges(len(texts), groups, self.batch)
        if not ranges:
            raise ValueError(f"{_OP}: texts must not be empty")
        self.start()
        from ray.util import ActorPool

        batches = [list(texts[start:end]) for start, end in ranges]
        results = ActorPool(self.actors).map(lambda actor, batch: actor.encode.remote(batch), batches)
        return torch.cat([self._next(results, batch) for batch in batches])

    def _next(self, results: Any, batch: list[str]) -> Tensor:
        """The embeddings of the next batch; errors name its texts."""
        import ray

        where = f"for {len(batch)} texts, the first {batch[0][:80]!r}"
        try:
            process, result = next(results)
        except ray.exceptions.RayActorError as error:
            reason = str(error).strip().splitlines()[0]
            raise EmbedderError(
                f"{_OP}: an actor must live for one of {self.retries + 1} tries, got none {where}: {reason}"
            ) from error
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if error.cause is not None else error
            raise EmbedderError(f"{_OP}: encode raised {type(cause).__name__} {where}: {cause}") from error
        self._processes.add(process)
        embeddings = torch.as_tensor(result)
        if embeddings.dim() != 2 or len(embeddings) != len(batch):
            raise EmbedderError(f"{_OP}: encode must return [{len(batch)}, D] {where}, got {list(embeddings.shape)}")
        return embeddings


class _Worker:
    """Runs the encoder in a Ray actor."""

    def __init__(self, encode: Callable[[Sequence[str]], Any]) -> None:
        self._encode = encode

    def process(self) -> str:
        """The process on its machine, another one after each restart."""
        return f"{socket.gethostname()} {os.getpid()}"

    def encode(self, texts: list[str]) -> tuple[str, Any]:
        embeddings = self._encode(texts)
        return self.process(), embeddings.detach().cpu() if isinstance(embeddings, Tensor) else embeddings


def batch_ranges(count: int, groups: int | Sequence[int], size: int) -> list[tuple[int, int]]:
    """Start and end of each batch: as many whole groups as fit into `size` texts, and at least one."""
    if isinstance(groups, int):
        if groups < 1 or count % groups:
            raise ValueError(f"{_OP}: groups must divide the number of texts, {count}, got {groups}")
        groups = [groups] * (count // groups)
    if sum(groups) != count or min(groups, default=1) < 0:
        raise ValueError(f"{_OP}: groups must be sizes with the sum {count}, got {list(groups)}")
    ranges: list[tuple[int, int]] = []
    start = end = 0
    for group_size in groups:
        if end > start and end + group_size - start > size:
            ranges.append((start, end))
            start = end
        end += group_size
    return [*ranges, (start, end)] if end > start else ranges
