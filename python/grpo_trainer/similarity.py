"""Embeddings from many processes of a Ray cluster, for embedders that are models of their own.

    pool = RayEmbedderPool(encode, workers=4, gpus_per_worker=0.25)    # encode: texts -> [N, D]
    embeddings = pool(texts, groups=8)                                 # eight neighbours are one prompt's
    pool.close()                                                       # or `with RayEmbedderPool(...) as pool:`

In a recipe: `algorithm: {similarity: {workers: 4, gpus_per_worker: 0.25}}`.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_OP = "RayEmbedderPool"


class EmbedderError(RuntimeError):
    """The embedder failed, or its actors cannot be had; the message says which and why."""


def check_ray(where: str) -> None:
    if importlib.util.find_spec("ray") is None:
        raise ValueError(f'{where}: needs the package ray, which is not installed: pip install "grpo-kernels[ray]"')


class RayEmbedderPool:
    """A callable texts -> [N, D] whose work Ray actors do. They start at the first call, or with `start()`.

    encode           any callable texts -> [N, D] that can be pickled; what it loads itself it loads in each actor
    workers          actors
    gpus_per_worker  may be a fraction: several actors on a GPU
    batch            texts of one call of `encode`, or one prompt's if those are more. What is embedded together follows
                     from the texts alone, whatever the number of workers and whichever of them is idle
    retries          how often work is done again whose actor died, before the pool gives up
    timeout          seconds in which the cluster must have placed an actor
    address          of the cluster, as ray.init takes it; None: that of RAY_ADDRESS, or one on this machine
    """

    def __init__(
        self, encode: Callable[[Sequence[str]], Any], workers: int, *, gpus_per_worker: float = 0.0,
        cpus_per_worker: float = 1.0, batch: int = 64, retries: int = 2, timeout: float = 300.0,
        address: str | None = None,
    ) -> None:  # fmt: skip
        for name, value, holds, must in (
            ("encode", encode, callable(encode), "be callable"),
            ("workers", workers, _is_count(workers) and workers > 0, "be a positive int"),
            ("batch", batch, _is_count(batch) and batch > 0, "be a positive int"),
            ("retries", retries, _is_count(retries) and retries >= 0, "be an int, not negative"),
            ("gpus_per_worker", gpus_per_worker, gpus_per_worker >= 0, "not be negative"),
            ("cpus_per_worker", cpus_per_worker, cpus_per_worker >= 0, "not be negative"),
            ("timeout", timeout, timeout > 0, "be positive"),
        ):
            if not holds:
                raise ValueError(f"{_OP}: {name} must {must}, got {value!r}")
        self.encode, self.workers, self.batch, self.retries = encode, workers, batch, retries
        self.timeout, self.address = timeout, address
        self.asked = {"num_cpus": cpus_per_worker, "num_gpus": gpus_per_worker}  # of Ray, for each actor
        self.restarts = 0  # actors that died and were made again
        self.actors: list[Any] = []
        self._began_ray = False

    def start(self) -> None:
        """Places the actors; an error tells what was asked for and what the cluster has."""
        if self.actors:
            return
        check_ray(_OP)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        if not ray.is_initialized():
            ray.init(address=self.address, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
            self._began_ray = True
        try:
            self.actors = [self._actor() for _ in range(self.workers)]
            self._wait_for(self.actors)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the actors, and Ray if the pool began it. A later call starts them again."""
        if not self.actors and not self._began_ray:
            return
        import ray

        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
        if self._began_ray:
            ray.shutdown()
            self._began_ray = False

    def __enter__(self) -> RayEmbedderPool:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, texts: Sequence[str], groups: int | Sequence[int] = 1) -> Tensor:
        """[N, D] in the order of the texts.

        groups  how many neighbours are one prompt's, or how many of each prompt: those go to one actor in one call
        """
        parts = parts_of(len(texts), groups, self.batch)
        if not parts:
            raise ValueError(f"{_OP}: texts must not be empty")
        self.start()
        found = self._done([list(texts[first:end]) for first, end in parts])
        widths = {each.shape[1] for each in found}
        if len(widths) > 1:
            raise EmbedderError(f"{_OP}: encode must give one width, got {sorted(widths)}")
        return torch.cat(found)

    def _done(self, parts: list[list[str]]) -> list[Tensor]:
        import ray

        waiting = deque(range(len(parts)))
        attempts = [0] * len(parts)
        found: dict[int, Tensor] = {}
        idle = deque(range(len(self.actors)))
        running: dict[Any, tuple[int, int]] = {}
        while waiting or running:
            while waiting and idle:
                part, actor = waiting.popleft(), idle.popleft()
                running[self.actors[actor].encode.remote(parts[part])] = (part, actor)
            (ready, *_), _ = ray.wait(list(running))
            part, actor = running.pop(ready)
            try:
                found[part] = _checked(ray.get(ready), len(parts[part]))
            except ray.exceptions.RayActorError as error:
                attempts[part] += 1
                self._replace(actor, attempts[part], error)
                waiting.appendleft(part)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause if error.cause is not None else error
                raise EmbedderError(
                    f"{_OP}: encode raised {type(cause).__name__} on worker {actor} for {len(parts[part])} texts, the "
                    f"first {parts[part][0][:80]!r}: {cause}"
                ) from error
            idle.append(actor)
        return [found[part] for part in range(len(parts))]

    def _replace(self, number: int, attempt: int, error: Exception) -> None:
        import ray

        reason = str(error).strip().splitlines()[0]
        if attempt > self.retries:
            raise EmbedderError(
                f"{_OP}: the work of worker {number} must be done within {self.retries} retries, and its actor died "
                f"{attempt} times: {reason}"
            ) from error
        self.restarts += 1
        _log.warning("%s: worker %d died (%s); restart %d, its work is done again", _OP, number, reason, self.restarts)
        ray.kill(self.actors[number])  # one that cannot be reached might come back
        self.actors[number] = self._actor()
        self._wait_for([self.actors[number]])

    def _actor(self) -> Any:
        import ray

        remote: Any = ray.remote(max_restarts=0, **self.asked)  # type: ignore[call-overload]
        return remote(_Worker).remote(self.encode)

    def _wait_for(self, actors: list[Any]) -> None:
        import ray

        asked = [actor.ready.remote() for actor in actors]
        placed, missing = ray.wait(asked, num_returns=len(asked), timeout=self.timeout)
        if missing:
            has, free = _resources(ray.cluster_resources()), _resources(ray.available_resources())
            raise EmbedderError(
                f"{_OP}: the cluster must place {len(asked)} actors of {self.asked} within {self.timeout:g} s, and has "
                f"placed {len(placed)}; it has {has}, of which {free} are free"
            )
        try:
            ray.get(placed)
        except ray.exceptions.RayError as error:
            raise EmbedderError(f"{_OP}: an actor could not begin: {error}") from error


class _Worker:
    """In a process of its own."""

    def __init__(self, encode: Callable[[Sequence[str]], Any]) -> None:
        self._encode = encode

    def ready(self) -> None:
        pass

    def encode(self, texts: list[str]) -> Any:
        found = self._encode(texts)
        return found.detach().cpu() if isinstance(found, Tensor) else found


def parts_of(count: int, groups: int | Sequence[int], most: int) -> list[tuple[int, int]]:
    """Neighbours that are embedded together, as firsts and ends: whole groups, as many as `most` texts allow."""
    if isinstance(groups, int):
        if groups < 1 or count % groups:
            raise ValueError(f"{_OP}: groups must divide the number of texts, {count}, got {groups}")
        groups = [groups] * (count // groups)
    if sum(groups) != count or min(groups, default=1) < 0:
        raise ValueError(f"{_OP}: groups must be sizes with the sum {count}, got {list(groups)}")
    found: list[tuple[int, int]] = []
    first = end = 0
    for size in groups:
        if end > first and end + size - first > most:
            found.append((first, end))
            first = end
        end += size
    return [*found, (first, end)] if end > first else found


def _checked(given: Any, count: int) -> Tensor:
    found = torch.as_tensor(given)
    if found.dim() != 2 or len(found) != count:
        raise EmbedderError(f"{_OP}: encode must give [{count}, D] for {count} texts, got {list(found.shape)}")
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _resources(all_: dict[str, float]) -> dict[str, float]:
    return {name: all_.get(name, 0.0) for name in ("CPU", "GPU")}
