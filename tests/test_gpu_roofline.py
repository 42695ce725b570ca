"""The instrument that predicts the speed of GPU kernels from machine code, and the budgets it holds them to."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tools import gpu_model, gpu_roofline, roofline_predict, sass
from tools.roofline_cases import CASES
from tools.roofline_predict import LoopReport
from tools.sass import Instruction, Kernel

ROOT = Path(__file__).parent.parent
NVCC = roofline_predict.find_nvcc()
needs_compilers = pytest.mark.skipif(
    NVCC is None or sass.find_nvdisasm() is None, reason="needs nvcc, and nvdisasm of the toolkit or of Triton"
)

SAMPLES = r"""
#define EACH (long i = blockIdx.x * 256L + threadIdx.x; i < n; i += gridDim.x * 256L)
__global__ void __launch_bounds__(256) wide_copy(const float4* in, float4* out, long n) {
#pragma unroll 1
  for (long i = blockIdx.x * 1024L + threadIdx.x; i + 768 < n; i += gridDim.x * 1024L) {
    const float4 a = in[i], b = in[i + 256], c = in[i + 512], d = in[i + 768];
    out[i] = a, out[i + 256] = b, out[i + 512] = c, out[i + 768] = d;
  }
}
__global__ void __launch_bounds__(256) byte_copy(const char* in, char* out, long n) {
#pragma unroll 1
  for EACH out[i] = in[i];
}
__global__ void __launch_bounds__(256) exponentials(const float4* in, float4* out, long n) {
#pragma unroll 1
  for EACH {
    double x = in[i].x, y = in[i].y, z = in[i].z, w = in[i].w;
#pragma unroll
    for (int k = 0; k < 4; ++k) x = exp(x), y = exp(y), z = exp(z), w = exp(w);
    out[i] = make_float4(x, y, z, w);
  }
}
__global__ void __launch_bounds__(256) local_array(const int* in, float* out, int n) {
  float bins[32];
  for (int k = 0; k < 32; ++k) bins[k] = 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < n; i += 256) bins[in[i] & 31] += 1;
  for (int k = 0; k < 32; ++k) out[threadIdx.x * 32 + k] = bins[k];
}
__global__ void __launch_bounds__(256) chosen_pointer(float* in, float* out, int n, bool is_shared) {
  __shared__ float tile[256];
  tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  float* const from = is_shared ? tile : in;
  float sum = 0;
#pragma unroll 1
  for (int i = 0; i < n; ++i) sum += from[(i + threadIdx.x) & 255];
  out[threadIdx.x] = sum;
}
__global__ void __launch_bounds__(256) chain(const int* next, int* out, int n) {
  int at = threadIdx.x;
#pragma unroll 1
  for (int i = 0; i < n; ++i) at = next[at];
  out[threadIdx.x] = at;
}
"""


# --- control flow


def listing(*rows: str) -> str:
    """A disassembly: labels end in a colon, other rows are instructions, one every 16 bytes."""
    lines, address = [], 0
    for row in rows:
        lines.append(row if row.endswith(":") else f"        /*{address:04x}*/  {row} ;")
        address += 0 if row.endswith(":") else 16
    return "\n".join(lines)


NESTED = listing(
    "MOV R1, R2",
    ".L_x_0:",
    "LDG.E R3, [R4.64]",
    ".L_x_1:",
    "@P1 BRA `(.L_x_2)",
    "FADD R5, R5, R3",
    "FADD R5, R5, 1",
    "BRA `(.L_x_3)",
    ".L_x_2:",
    "FMUL R5, R5, R3",
    ".L_x_3:",
    "@P0 BRA `(.L_x_1)",
    "STG.E.128 [R6.64], R8",
    "@!P2 BRA `(.L_x_0)",
    "EXIT",
    ".L_x_4:",
    "BRA `(.L_x_4)",
)


def names(trace: list[Instruction]) -> list[str]:
    return [instruction.name for instruction in trace]


def test_nested_loops_and_paths() -> None:
    kernel = sass.parse_kernel("nested", NESTED)
    inner, outer = kernel.loops
    assert (inner.depth, outer.depth) == (2, 1) and inner.blocks < outer.blocks
    assert names(kernel.trace(inner)) == ["BRA", "FADD", "FADD", "BRA", "BRA"]
    assert names(kernel.trace(inner, sass.Route(is_longest=False))) == ["BRA", "FMUL", "BRA"]
    assert names(kernel.trace(outer)) == ["LDG", "BRA", "FADD", "FADD", "BRA", "BRA", "STG", "BRA"]
    assert names(kernel.trace(outer, sass.Route(trips=(("", 3),)))).count("FADD") == 6
    assert names(kernel.trace(outer, without=inner)) == ["LDG", "STG", "BRA"]
    assert names(kernel.trace(kernel.body))[-1] == "EXIT"
    assert roofline_predict.hot_loop(kernel) == outer  # the inner one moves nothing


def test_dominators() -> None:
    kernel = sass.parse_kernel("nested", NESTED)
    dominated_by = sass.dominators(kernel.blocks)
    of = {block.instructions[0].opcode: n for n, block in enumerate(kernel.blocks)}
    assert of["LDG.E"] in dominated_by[of["EXIT"]]
    assert of["FMUL"] not in dominated_by[of["STG.E.128"]]
    assert dominated_by[len(kernel.blocks) - 1] == set()  # the padding cannot be reached


def test_divergent_branches_and_slow_paths_are_not_taken() -> None:
    rows = (
        ".L_x_0:",
        "BRA.DIV UR4, `(.L_x_9)",
        "@P0 BRA P1, `(.L_x_1)",
        "MOV R16, R4",
        "CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_rn_f64_full)",
        "DADD R2, R2, R4",
        ".L_x_1:",
        "@!P3 BRA `(.L_x_0)",
        "EXIT",
        ".L_x_9:",
        "WARPSYNC.COLLECTIVE R5, `(.L_x_0)",
        "BRA `(.L_x_1)",
    )
    kernel = sass.parse_kernel("slow", listing(*rows))
    assert names(kernel.trace(kernel.loops[0])) == ["BRA", "BRA", "BRA"]


def test_a_route_visits_and_avoids_source_lines(tmp_path: Path) -> None:
    source = tmp_path / "walk.cu"
    source.write_text("if (weighted) x *= weights[i];\nsum += x;\n")
    rows = (
        ".L_x_0:",
        "@P0 BRA `(.L_x_1)",
        f'//## File "{source}", line 1:',
        "LDG.E R3, [R4.64]",
        "FMUL R1, R1, R3",
        ".L_x_1:",
        "@P1 BRA `(.L_x_2)",
        f'//## File "{source}", line 2:',
        "FADD R5, R5, R1",
        ".L_x_2:",
        "@P2 BRA `(.L_x_0)",
        "EXIT",
    )
    kernel = sass.parse_kernel("walk", listing(*rows))
    assert names(kernel.trace(kernel.loops[0])) == ["BRA", "LDG", "FMUL", "BRA", "FADD", "BRA"]
    assert names(kernel.trace(kernel.loops[0], sass.Route(avoid="weights"))) == ["BRA", "BRA", "FADD", "BRA"]
    route = sass.Route(is_longest=False, through="sum")
    assert names(kernel.trace(kernel.loops[0], route)) == ["BRA", "BRA", "FADD", "BRA"]


def test_control_information() -> None:
    stall, write, read, wait = 5, 2, 7, 0b001001
    bits = stall | write << 5 | read << 8 | wait << 11
    kernel = sass.parse_kernel("one", listing("LDG.E R3, [R4.64]"), (bits << 105).to_bytes(16, "little"))
    result = kernel.instructions[0]
    assert (result.stall, result.write_barrier, result.read_barrier, result.wait) == (stall, write, read, wait)


# --- the model


@pytest.mark.parametrize(
    ("opcode", "pipe", "cycles"),
    [
        ("FFMA", "fp32", 1),
        ("IMAD.WIDE.U32", "imad", 2),
        ("LOP3.LUT", "alu", 2),
        ("DFMA", "fp64", 2),
        ("MUFU.EX2", "xu", 8),
        ("F2F.F64.F32", "xu", 8),
        ("SHFL.BFLY", "shuffle", 4),
        ("LDG.E.U8", "lsu", 4),
        ("LDS.128", "lsu", 16),
        ("LDSM.16.M88.4", "lsu", 16),
        ("LDGSTS.E.BYPASS.128", "lsu", 16),
        ("HMMA.16816.F32.BF16", "tensor", 8),
        ("HMMA.16816.F32", "tensor", 8),
        ("HGMMA.64x256x16.F32.BF16", "tensor", 128),
        ("HMMA.1688.F32.TF32", "tensor", 8),
        ("UIADD3", "uniform", 1),
        ("BRA.U", "branch", 2),
    ],
)
def test_pipes(opcode: str, pipe: str, cycles: float) -> None:
    instruction = Instruction(0, opcode)
    assert gpu_model.pipe_of(instruction) == pipe
    assert gpu_model.cost_of(instruction, "sm_90") == cycles


def test_float64_is_slower_on_sm_80() -> None:
    trace = [Instruction(0, "DADD")] * 8 + [Instruction(0, "MOV")]
    issues = {name: gpu_model.issue_cycles(trace, name) for name in ("sm_80", "sm_90")}
    assert {name: (issue.cycles, issue.bound) for name, issue in issues.items()} == {
        "sm_80": (32.0, "fp64"),
        "sm_90": (16.0, "fp64"),
    }


def load(barrier: int, wait: int = 0) -> Instruction:
    return Instruction(0, "LDG.E.128", write_barrier=barrier, wait=wait)


def test_loads_overlap_until_one_is_needed() -> None:
    gpu = gpu_model.GPUS["H100"]
    latency = gpu.latency * gpu.clock
    use = Instruction(0, "FADD", wait=0b11)
    together = gpu_model.loop_latency([load(0), load(1), use], gpu)
    in_turn = gpu_model.loop_latency([load(0), load(1, wait=0b1), use], gpu)
    assert (together.loads_in_flight, together.bytes_in_flight) == (2, 32)
    assert together.cycles == pytest.approx(latency, rel=0.05)
    assert in_turn.loads_in_flight == 1 and in_turn.cycles == pytest.approx(2 * latency, rel=0.05)


def test_a_prefetched_load_hides_its_latency() -> None:
    gpu = gpu_model.GPUS["H100"]
    work = [Instruction(0, "FADD", stall=4)] * 400
    ahead = gpu_model.loop_latency([Instruction(0, "MOV", wait=0b1), load(0), *work], gpu)
    behind = gpu_model.loop_latency([load(0), Instruction(0, "MOV", wait=0b1), *work], gpu)
    assert ahead.cycles < 1.02 * 1600 and behind.cycles > 1600 + 0.9 * gpu.latency * gpu.clock


def test_asynchronous_copies_are_waited_for() -> None:
    gpu = gpu_model.GPUS["H100"]
    copy, commit = Instruction(0, "LDGSTS.E.BYPASS.128"), Instruction(0, "LDGDEPBAR")
    all_done = gpu_model.loop_latency([copy, commit, Instruction(0, "DEPBAR.LE", "SB0, 0x0")], gpu)
    one_behind = gpu_model.loop_latency([copy, commit, Instruction(0, "DEPBAR.LE", "SB0, 0x1")], gpu)
    assert all_done.cycles > 1.5 * one_behind.cycles
    assert gpu_model.memory_of([copy]).load_bytes == 16


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "warps"),
    [
        (32, 512, 0, 64),
        (33, 512, 0, 48),
        (134, 128, 0, 12),
        (32, 64, 0, 64),
        (32, 256, 100 * 1024, 16),
        (32, 32, 0, 32),
    ],
)
def test_occupancy(registers: int, threads: int, shared: int, warps: int) -> None:
    kernel = Kernel("k", [], registers=registers, shared_bytes=shared)
    assert gpu_model.occupancy(kernel, threads, "sm_90") == warps


# --- the instrument on kernels whose speed is known


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Hot loops of the samples, by architecture and name."""
    folder = tmp_path_factory.mktemp("samples")
    source = folder / "samples.cu"
    source.write_text(SAMPLES)
    known: dict[str, dict[str, LoopReport]] = {}

    def reports(architecture: str) -> dict[str, LoopReport]:
        if architecture not in known:
            cubin = folder / f"{architecture}.cubin"
            roofline_predict.compile_source(source, architecture, cubin)
            gpu = gpu_model.GPUS[gpu_model.ARCHITECTURES[architecture]]
            known[architecture] = {
                kernel.demangled.partition("(")[0]: roofline_predict.report_loop(
                    kernel, roofline_predict.hot_loop(kernel), gpu, gpu_model.occupancy(kernel, 256, architecture)
                )
                for kernel in sass.read_cubin(cubin)
            }
        return known[architecture]

    return reports


@needs_compilers
@pytest.mark.parametrize("architecture", list(gpu_model.ARCHITECTURES))
def test_known_kernels(samples: Any, architecture: str) -> None:
    result = samples(architecture)
    wide, byte = result["wide_copy"], result["byte_copy"]
    assert wide.share >= 0.9 and wide.latency.loads_in_flight == 4 and wide.latency.bytes_in_flight == 64
    assert wide.memory.loads == {128: 4} == wide.memory.stores
    assert byte.memory.loads == {8: 1} == byte.memory.stores
    assert byte.share < 0.5 and byte.latency_share < byte.issue_share
    slow = result["exponentials"]
    assert slow.issue_share < slow.latency_share and slow.share < 0.75
    assert result["local_array"].memory.local > 0 and wide.memory.local == 0
    assert result["chosen_pointer"].memory.generic > 0 and wide.memory.generic == 0
    chain = result["chain"]
    assert chain.latency.loads_in_flight == 1 and chain.share == chain.latency_share < 0.9


@needs_compilers
def test_a_byte_wise_copy_is_slow(samples: Any) -> None:
    assert samples("sm_90")["byte_copy"].share < 0.35


@needs_compilers
def test_resources_are_read(samples: Any, tmp_path: Path) -> None:
    samples("sm_90")
    source = tmp_path / "samples.cu"
    source.write_text(SAMPLES)
    command = [sys.executable, str(ROOT / "tools" / "gpu_roofline.py"), "--source", str(source), "--loops"]
    done = subprocess.run([*command, "--kernel", "^chosen_pointer"], capture_output=True, text=True, check=True)
    assert "1024 bytes of static shared memory" in done.stdout and "64 warps resident with blocks of 256" in done.stdout
    assert "wide_copy" not in done.stdout and "1 LD.E" in done.stdout and "samples.cu:" in done.stdout


# --- our kernels


@dataclass(frozen=True)
class Budget:
    """Limits on a prediction: counts are those of the longest launch, flaws those of all launches."""

    share: float
    instructions: float
    registers: int
    occupancy: float
    width: int
    local: int = 0
    generic: int = 0


# Set to the values that the kernels reach, so that nothing slips back; a better kernel tightens its line.
BUDGETS = {
    "token_logprobs, forward, bf16": Budget(0.97, 6.7, 40, 0.75, 128),
    "token_logprobs, backward, bf16": Budget(0.97, 6.7, 48, 0.62, 128),
    "token_logprobs, forward, bf16, softcap, entropy": Budget(0.70, 27.7, 48, 0.62, 128),
    "token_logprobs, backward, bf16, softcap, entropy": Budget(0.97, 31.3, 46, 0.62, 128),
    "token_logprobs, forward, fp32": Budget(0.97, 6.3, 40, 0.75, 128),
    "token_logprobs, backward, fp32 to bf16": Budget(0.97, 5.7, 38, 0.75, 128),
    "logits_policy_loss, clip, bf16": Budget(0.97, 7.2, 96, 0.25, 128),
    "policy_loss, 4M tokens, clip, k3, metrics": Budget(0.50, 94, 64, 0.50, 128),
    "policy_loss, 4M tokens, CISPO, k3, metrics": Budget(0.50, 85, 64, 0.50, 128),
    "policy_loss, 4M tokens, GSPO, k3, metrics": Budget(0.33, 90, 80, 0.37, 128),
    "group_advantages, 16M rewards, groups of 8": Budget(0.97, 143, 58, 0.5, 128),
    "group_advantages, 65,536 rewards, batch step": Budget(0.038, 317, 105, 0.12, 64),
    "group_advantages, 16M rewards, unsorted ids": Budget(0.054, 445, 92, 0, 0),
    "endpoint_segments, 512 x 8,192, critic, batch norm": Budget(0.32, 203, 64, 0.5, 128),
    "token_advantages, 512 x 8,192, critic, whitened": Budget(0.75, 75.8, 72, 0.37, 32),
    "sampling_correction, 4M tokens, token weights": Budget(0.066, 250, 168, 0.12, 32),
    "similarity_groups, cosines of 1,024 x 16 x 384, bf16": Budget(0.60, 4.4, 91, 0.12, 128),
    "similarity_groups, cosines of 1,024 x 16 x 1,024, bf16": Budget(0.79, 4.4, 91, 0.12, 128),
    "similarity_groups, cosines of 1,024 x 16 x 4,096, bf16": Budget(0.93, 4.4, 91, 0.12, 128),
    "similarity_groups, cosines of 1,024 x 64 x 384, bf16": Budget(0.88, 8.5, 116, 0.25, 128),
    "similarity_groups, cosines of 1,024 x 64 x 1,024, bf16": Budget(0.94, 8.5, 116, 0.25, 128),
    "similarity_groups, cosines of 1,024 x 64 x 4,096, bf16": Budget(0.98, 8.5, 116, 0.25, 128),
    "similarity_groups, cosines of 1,024 x 256 x 384, bf16": Budget(0.80, 28, 242, 0.12, 32),
    "similarity_groups, cosines of 1,024 x 256 x 1,024, bf16": Budget(0.81, 20.4, 242, 0.12, 32),
    "similarity_groups, cosines of 1,024 x 256 x 4,096, bf16": Budget(0.81, 17, 242, 0.12, 128),
    "similarity_groups, cosines of 1,024 x 64 x 1,024, fp32": Budget(0.89, 44, 143, 0.18, 128),
    "similarity_groups, cosines of 1,024 x 256 x 1,024, fp32": Budget(0.31, 184, 212, 0.12, 128),
    "similarity_groups, clusters of 1,024 x 16": Budget(0.0105, 205, 90, 0.12, 0),
    "similarity_groups, clusters of 1,024 x 64": Budget(0.031, 430, 96, 0.18, 0),
    "similarity_groups, clusters of 1,024 x 256": Budget(0.0165, 400, 128, 0.25, 64),
}


def run_tool(folder: Path, *options: str) -> dict[str, dict[str, Any]]:
    # a process of its own, because other tests set TRITON_INTERPRET
    command = [sys.executable, str(ROOT / "tools" / "gpu_roofline.py"), "--json", str(folder / "report.json"), *options]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "report.json").read_text())
    return {f"{one['op']}, {one['name']}": one for one in report["H100 SXM"]}


def test_every_call_has_a_budget() -> None:
    assert {f"{case.op}, {case.name}" for case in CASES} == BUDGETS.keys()


def overruns(budget: Budget, prediction: dict[str, Any]) -> list[str]:
    """Describes the limits of a budget that a prediction exceeds."""
    launches = prediction["launches"]
    result = {"share": prediction["share"], **max(launches, key=lambda launch: launch["us"])}
    result |= {name: max(launch[name] for launch in launches) for name in ("local", "generic")}
    at_least = [name for name in ("share", "occupancy", "width") if result[name] < getattr(budget, name)]
    at_most = [
        name for name in ("instructions", "registers", "local", "generic") if result[name] > getattr(budget, name)
    ]
    return [f"{name} {result[name]}, budget {getattr(budget, name)}" for name in at_least + at_most]


@pytest.mark.full
@needs_compilers
def test_budgets(tmp_path: Path) -> None:
    """One test for all calls, because their kernels take half a minute to compile."""
    failures = []
    for call, prediction in run_tool(tmp_path, "--backend", "cuda").items():
        print(f"{call}: {prediction['us']} us, {prediction['share']:.4f} of a copy")
        failures += [f"{call}: {text}" for text in overruns(BUDGETS[call], prediction)]
    assert not failures, "\n".join(failures)


def test_an_overrun_is_seen() -> None:
    launch = {"us": 1, "occupancy": 0.5, "width": 64, "instructions": 9.5, "registers": 40, "local": 2, "generic": 0}
    prediction = {"share": 0.5, "launches": [launch, launch | {"us": 0.5, "generic": 1, "registers": 99}]}
    assert overruns(Budget(0.5, 9.5, 40, 0.5, 64, local=2, generic=1), prediction) == []
    assert overruns(Budget(0.6, 9, 39, 0.6, 128), prediction) == [
        "share 0.5, budget 0.6",
        "occupancy 0.5, budget 0.6",
        "width 64, budget 128",
        "instructions 9.5, budget 9",
        "registers 40, budget 39",
        "local 2, budget 0",
        "generic 1, budget 0",
    ]


@pytest.mark.full
@needs_compilers
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_stands_beside_ours(tmp_path: Path) -> None:
    result = run_tool(tmp_path, "--backend", "triton", "--op", "token_logprobs")
    assert len(result) == 6
    assert all(
        0 < prediction["share"] <= 1 and prediction["launches"][0]["registers"] for prediction in result.values()
    )


def test_the_document_has_a_place_for_the_table() -> None:
    document = (ROOT / "docs" / "performance.md").read_text()
    assert "| new |" in gpu_roofline.replaced(document, "| new |")
    with pytest.raises(SystemExit, match="once each"):
        gpu_roofline.replaced("nothing", "| new |")
