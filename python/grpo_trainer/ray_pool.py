"""A pool of embedders in the actors of a Ray cluster.

    pool = RayEmbedderPool(encode, workers=4, gpus_per_worker=0.25)    # encode: texts -> [N, D]
    embeddings = pool(texts, groups=8)                                 # eight consecutive texts belong to one prompt
    pool.close()                                                       # or `with RayEmbedderPool(...) as pool:`

In a recipe: `algorithm: {similarity: {workers: 4, gpus_per_worker: 0.25}}`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_OP = "RayEmbedderPool"


class EmbedderError(RuntimeError):
    """The embedder failed, or its actors cannot be placed; the message says which and why."""


def check_ray(where: str, address: str | None = None) -> None:
    """Raises if Ray is not installed, or if nothing listens at the cluster's host:port.

    Args:
        where: key or class that needs it.
        address: as in RayEmbedderPool.
    """
    if importlib.util.find_spec("ray") is None:
        raise ValueError(f'{where}: needs the package ray, which is not installed: pip install "grpo-kernels[ray]"')
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

    The batches follow from the texts alone, not from the number of workers or from which of them is idle.

    Args:
        encode: picklable callable texts -> [N, D]; models that it loads lazily are loaded in each actor.
        workers: number of actors.
        gpus_per_worker: GPUs per actor; a fraction places several actors on one GPU.
        cpus_per_worker: CPUs per actor.
        batch: texts per call of `encode`; a prompt with more texts is not split.
        retries: how often a batch is repeated after its actor died.
        timeout: seconds that the cluster has to place an actor.
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
            ("workers", workers, _is_int(workers) and workers > 0, "be a positive int"),
            ("batch", batch, _is_int(batch) and batch > 0, "be a positive int"),
            ("retries", retries, _is_int(retries) and retries >= 0, "be a non-negative int"),
            ("gpus_per_worker", gpus_per_worker, gpus_per_worker >= 0, "not be negative"),
            ("cpus_per_worker", cpus_per_worker, cpus_per_worker >= 0, "not be negative"),
            ("timeout", timeout, timeout > 0, "be positive"),
        ):
            if not is_valid:
                raise ValueError(f"{_OP}: {name} must {rule}, got {value!r}")
        self.encode, self.workers, self.batch, self.retries = encode, workers, batch, retries
        self.timeout, self.address = timeout, address
        self.resources = {"num_cpus": cpus_per_worker, "num_gpus": gpus_per_worker}  # per actor
        self.restarts = 0  # actors that died and were replaced
        self.actors: list[Any] = []
        self._started_ray = False

    def start(self) -> None:
        """Places the actors; if that fails, the error names the requested and the available resources."""
        if self.actors:
            return
        check_ray(_OP, self.address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        if not ray.is_initialized():
            options: Any = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.WARNING}
            try:
                ray.init(address=self.address, **options)
            except ConnectionError as error:
                where = f"at {self.address or os.environ.get('RAY_ADDRESS')!r}, the address or RAY_ADDRESS"
                raise EmbedderError(f"{_OP}: a Ray cluster must answer {where}: {error}") from error
            self._started_ray = True
        try:
            self.actors = [self._create_actor() for _ in range(self.workers)]
            self._wait_until_ready(self.actors)
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
        embeddings = self._run([list(texts[start:end]) for start, end in ranges])
        widths = {part.shape[1] for part in embeddings}
        if len(widths) > 1:
            raise EmbedderError(f"{_OP}: encode must return one width, got {sorted(widths)}")
        return torch.cat(embeddings)

    def _run(self, batches: list[list[str]]) -> list[Tensor]:
        import ray

        waiting = deque(range(len(batches)))
        attempts = [0] * len(batches)
        results: dict[int, Tensor] = {}
        idle = deque(range(len(self.actors)))
        running: dict[Any, tuple[int, int]] = {}
        while waiting or running:
            while waiting and idle:
                batch, actor = waiting.popleft(), idle.popleft()
                running[self.actors[actor].encode.remote(batches[batch])] = (batch, actor)
            (ready, *_), _ = ray.wait(list(running))
            batch, actor = running.pop(ready)
            try:
                results[batch] = _checked(ray.get(ready), len(batches[batch]))
            except ray.exceptions.RayActorError as error:
                attempts[batch] += 1
                self._replace(actor, attempts[batch], error)
                waiting.appendleft(batch)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause if error.cause is not None else error
                raise EmbedderError(
                    f"{_OP}: encode raised {type(cause).__name__} on worker {actor} for {len(batches[batch])} texts, "
                    f"the first {batches[batch][0][:80]!r}: {cause}"
                ) from error
            idle.append(actor)
        return [results[batch] for batch in range(len(batches))]

    def _replace(self, number: int, attempt: int, error: Exception) -> None:
        import ray

        reason = str(error).strip().splitlines()[0]
        if attempt > self.retries:
            raise EmbedderError(
                f"{_OP}: the batch of worker {number} must succeed within {self.retries} retries, and its actor died "
                f"{attempt} times: {reason}"
            ) from error
        self.restarts += 1
        _log.warning("%s: worker %d died (%s); restart %d, its batch is repeated", _OP, number, reason, self.restarts)
        ray.kill(self.actors[number])  # an actor that is only unreachable might return
        self.actors[number] = self._create_actor()
        self._wait_until_ready([self.actors[number]])

    def _create_actor(self) -> Any:
        import ray

        remote: Any = ray.remote(max_restarts=0, **self.resources)  # type: ignore[call-overload]
        return remote(_Worker).remote(self.encode)

    def _wait_until_ready(self, actors: list[Any]) -> None:
        import ray

        pending = [actor.ready.remote() for actor in actors]
        placed, missing = ray.wait(pending, num_returns=len(pending), timeout=self.timeout)
        if missing:
            total, free = _cpus_and_gpus(ray.cluster_resources()), _cpus_and_gpus(ray.available_resources())
            raise EmbedderError(
                f"{_OP}: the cluster must place {len(pending)} actors of {self.resources} within {self.timeout:g} s, "
                f"and placed {len(placed)}; it has {total}, of which {free} are free"
            )
        try:
            ray.get(placed)
        except ray.exceptions.RayError as error:
            raise EmbedderError(f"{_OP}: an actor failed to start: {error}") from error


class _Worker:
    """Runs the encoder in a Ray actor."""

    def __init__(self, encode: Callable[[Sequence[str]], Any]) -> None:
        self._encode = encode

    def ready(self) -> None:
        pass

    def encode(self, texts: list[str]) -> Any:
        embeddings = self._encode(texts)
        return embeddings.detach().cpu() if isinstance(embeddings, Tensor) else embeddings


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


def _checked(result: Any, count: int) -> Tensor:
    embeddings = torch.as_tensor(result)
    if embeddings.dim() != 2 or len(embeddings) != count:
        raise EmbedderError(f"{_OP}: encode must return [{count}, D] for {count} texts, got {list(embeddings.shape)}")
    return embeddings


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _cpus_and_gpus(resources: dict[str, float]) -> dict[str, float]:
    return {name: resources.get(name, 0.0) for name in ("CPU", "GPU")}
