"""A model of GPUs: which pipe each instruction takes, what one warp's code costs, and what bounds a loop.

Everything here is an assumption to predict with, not a measurement.
"""

from __future__ import annotations

import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tools.sass import NO_BARRIER, RESERVED_SHARED_BYTES, Instruction, Kernel

__all__ = ["ARCHITECTURES", "GPUS", "Gpu", "Memory", "Timeline", "issue_cycles", "occupancy", "pipe_of"]

LANES = 32
SCHEDULERS = 4  # per SM
LAUNCH_SECONDS = 3e-6  # one launch behind another, with its ramp and tail


@dataclass(frozen=True)
class Gpu:
    """Assumptions about one product.

    Attributes:
        copy: bytes per second of a large device-to-device copy, read and written.
        latency: seconds from a load to its data while memory is as busy as in a copy.
        idle_latency: the same while memory is idle; between the two, in proportion to the bandwidth in use.
    """

    name: str
    architecture: str
    sms: int
    clock: float
    copy: float
    latency: float = 700e-9
    idle_latency: float = 400e-9


# SMs and boost clocks from the data sheets, B200's clock assumed; the copy is 83 to 90 % of the data sheet's bandwidth.
# Latencies are assumptions until they are measured: kernels bound by latency gain or lose in proportion.
GPUS = {
    "A100": Gpu("A100 SXM", "sm_80", 108, 1.41e9, 1.7e12),
    "H100": Gpu("H100 SXM", "sm_90", 132, 1.755e9, 3.0e12),
    "H200": Gpu("H200 SXM", "sm_90", 132, 1.755e9, 4.3e12),
    "B200": Gpu("B200", "sm_100", 148, 1.85e9, 7.0e12),
}
ARCHITECTURES = {"sm_80": "A100", "sm_90": "H100", "sm_100": "B200"}  # the GPU that stands for each
MAX_WARPS, MAX_BLOCKS, REGISTERS = 64, 32, 65536  # per SM, of compute capability 8.0, 9.0 and 10.0
SHARED_BYTES = {"sm_80": 164 * 1024, "sm_90": 228 * 1024, "sm_100": 228 * 1024}

# Results per clock and SM, from "Throughput of Native Arithmetic Instructions" in the CUDA C++ Programming Guide.
# sm_100 is assumed to be as sm_90 is. IMAD issues to half of the fp32 pipe on sm_90 and later; shuffles and memory
# accesses share one queue ("mio").
THROUGHPUT = {
    "sm_80": {"fp32": 64, "imad": 64, "alu": 64, "fp64": 32, "xu": 16, "vote": 64, "shuffle": 32, "lsu": 32},
    "sm_90": {"fp32": 128, "imad": 64, "alu": 64, "fp64": 64, "xu": 16, "vote": 64, "shuffle": 32, "lsu": 32},
    "sm_100": {"fp32": 128, "imad": 64, "alu": 64, "fp64": 64, "xu": 16, "vote": 64, "shuffle": 32, "lsu": 32},
}
# Not in that table: cycles of a scheduler per instruction.
OTHER_CYCLES = {"branch": 2.0, "uniform": 1.0, "constant": 2.0, "special": 8.0, "control": 1.0}
# Multiply-adds of a scheduler's tensor core per clock in mma.sync, dense, of 16-bit numbers: that of the A100's data
# sheet. The H100 reaches about 62 % of its data sheet's 512 that way, and only wgmma more; B200 is assumed
# to be alike. TF32 takes twice as long.
TENSOR_PRODUCTS = 256
TENSOR_SHAPE = re.compile(r"HMMA\.168(16|8|4)\.")
# wgmma reaches the data sheet's number. Four warps share a product, a quarter of its rows each.
WGMMA_PRODUCTS = 512
WGMMA_SHAPE = re.compile(r"HGMMA\.(\d+)x(\d+)x(\d+)\.")

_PIPES = (
    ("fp32", r"F(ADD|MUL|FMA)\d?$|FFMA32I|HADD2|HMUL2|HFMA2|FSWZADD"),
    ("imad", r"IMAD|IDP|XMAD"),
    ("fp64", r"D(ADD|MUL|FMA|SETP|MNMX)$"),
    ("tensor", r"[HIDBQ]G?MMA$|.*MMA$|UTC"),
    ("xu", r"MUFU|F2F$|F2I|I2F$|FRND|POPC|FLO|BREV|REDUX|CREDUX|MATCH"),
    ("vote", r"VOTE$"),
    ("shuffle", r"SHFL"),
    ("lsu", r"LD[GSL]?$|ST[GSL]?$|LDGSTS|LDSM|STSM|ATOM|RED[GS]?$|UBLK|UTMA|STAS|SYNCS"),
    ("special", r"S2R|S2UR"),
    ("constant", r"LDCU?$"),
    ("branch", r"BRA|BRX|JM|CALL|RET|EXIT|BSSY|BSYNC|BREAK|WARPSYNC|YIELD|BMOV|BAR$|UCGABAR|BPT|NANOSLEEP"),
    ("control", r"NOP|DEPBAR|LDGDEPBAR|MEMBAR|ERRBAR|CCTL|FENCE|ACQBULK|ELECT|PREEXIT"),
    ("uniform", r"U[A-Z]|R2UR|VOTEU"),
)
_PIPE_PATTERNS = [(pipe, re.compile(pattern)) for pipe, pattern in _PIPES]
# Cycles until a scoreboard is released, for results that no fixed number of stall cycles covers.
LATENCY = {"lsu": 30, "shuffle": 24, "xu": 24, "fp64": 16, "constant": 40, "special": 30, "uniform": 12}
OTHER_LATENCY, OPERAND_LATENCY, BARRIER_LATENCY, L1_LATENCY = 20, 12, 30, 40
GLOBAL_LOADS = ("LDG", "LD", "LDGSTS", "ATOMG", "ATOM")
GLOBAL_STORES = ("STG", "ST", "RED", "REDG")
BULK_COPIES = ("UBLKCP", "UTMALDG", "UTMASTG")


def pipe_of(instruction: Instruction) -> str:
    """The pipe that executes an instruction; integer, logic, comparison and selection share "alu"."""
    return _pipe(instruction.opcode)


@functools.cache
def _pipe(opcode: str) -> str:
    name = opcode.partition(".")[0]
    return next((pipe for pipe, pattern in _PIPE_PATTERNS if pattern.match(name)), "alu")


def cost_of(instruction: Instruction, architecture: str) -> float:
    """Cycles for which an instruction of one warp keeps its pipe of a scheduler busy."""
    return _cost(instruction.opcode, architecture)


@functools.cache
def _cost(opcode: str, architecture: str) -> float:
    pipe = _pipe(opcode)
    if pipe == "tensor":
        if wgmma := WGMMA_SHAPE.match(f"{opcode}."):
            rows, columns, depth = map(int, wgmma.groups())
            return rows / 4 * columns * depth / WGMMA_PRODUCTS
        shape = TENSOR_SHAPE.match(f"{opcode}.")
        products = 16 * 8 * int(shape[1]) if shape else 16 * 8 * 16
        return products / TENSOR_PRODUCTS * (2 if "TF32" in opcode else 1)
    lanes = THROUGHPUT[architecture].get(pipe)
    if lanes is None:
        return OTHER_CYCLES[pipe]
    cycles = LANES * SCHEDULERS / lanes
    if pipe == "lsu":  # 128 bytes a clock and SM
        cycles *= max(1.0, Instruction(0, opcode).access_bits / 32)
    if re.match(r"F(ADD|MUL|FMA)2$", opcode.partition(".")[0]):  # two results a thread
        cycles *= 2
    return cycles


@dataclass(frozen=True)
class Issue:
    """Scheduler cycles of a sequence of instructions, and the pipe that takes most."""

    cycles: float
    bound: str
    by_pipe: dict[str, float]


def issue_cycles(trace: Sequence[Instruction], architecture: str) -> Issue:
    """The larger of the issue slots and the cycles of the busiest unit."""
    by_pipe: defaultdict[str, float] = defaultdict(float, issue=len(trace))
    for instruction in trace:
        pipe, cost = pipe_of(instruction), cost_of(instruction, architecture)
        by_pipe[pipe] += cost
        if pipe == "imad":
            by_pipe["fp32"] += LANES * SCHEDULERS / THROUGHPUT[architecture]["fp32"]
        elif pipe in ("lsu", "shuffle"):
            by_pipe["mio"] += cost
    bound = max(by_pipe, key=lambda pipe: by_pipe[pipe])
    return Issue(by_pipe[bound], bound, dict(by_pipe))


@dataclass(frozen=True)
class Memory:
    """Accesses of one thread in a sequence of instructions.

    Attributes:
        loads: global accesses by width in bits; stores likewise.
        generic: accesses that find out at run time whether an address is global, shared or local.
        bulk_copies: asynchronous bulk copies, whose size the code does not show.
    """

    loads: dict[int, int]
    stores: dict[int, int]
    generic: int
    local: int
    shared: int
    bulk_copies: int

    @property
    def load_bytes(self) -> int:
        return sum(bits * count for bits, count in self.loads.items()) // 8

    @property
    def store_bytes(self) -> int:
        return sum(bits * count for bits, count in self.stores.items()) // 8

    @property
    def bytes(self) -> int:
        return self.load_bytes + self.store_bytes


def memory_of(trace: Iterable[Instruction]) -> Memory:
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    kinds: Counter[str] = Counter()
    for instruction in trace:
        name = instruction.name
        if name in GLOBAL_LOADS:
            loads[instruction.access_bits] += 1
        elif name in GLOBAL_STORES:
            stores[instruction.access_bits] += 1
        kinds["generic"] += name in ("LD", "ST", "ATOM")
        kinds["local"] += name in ("LDL", "STL")
        kinds["shared"] += name in ("LDS", "STS", "LDSM", "STSM", "ATOMS")
        kinds["bulk"] += name in BULK_COPIES
    return Memory(
        dict(sorted(loads.items())),
        dict(sorted(stores.items())),
        kinds["generic"],
        kinds["local"],
        kinds["shared"],
        kinds["bulk"],
    )


class Timeline:
    """One warp alone, issuing in order: stalls and scoreboards as the code says, latencies as assumed."""

    def __init__(self, gpu: Gpu, share: float = 1.0, has_rereads: bool = False) -> None:
        """Args:
        share: the part of a copy's bandwidth that is in use, which lengthens global loads.
        has_rereads: whether a source line that loads again, after its data had arrived, finds them in L1.
        """
        self.gpu = gpu
        self.global_latency = (gpu.idle_latency + (gpu.latency - gpu.idle_latency) * share) * gpu.clock
        self.has_rereads = has_rereads
        self.arrivals: dict[str, float] = {}  # of the first load, by source line
        self.now = 0.0
        self.scoreboards: list[list[float]] = [[] for _ in range(6)]
        self.pipe_free: dict[str, float] = {}
        self.copies: list[float] = []  # asynchronous copies not yet bound to a scoreboard
        self.outstanding: list[tuple[float, int]] = []  # completion and bytes of global loads
        self.most_loads = self.most_bytes = 0

    def run(self, trace: Sequence[Instruction]) -> float:
        """Issues a sequence; returns the cycles it took."""
        start = self.now
        for instruction in trace:
            self._wait(instruction)
            self._issue(instruction)
        return self.now - start

    def _wait(self, instruction: Instruction) -> None:
        ready = self.now
        if not instruction.wait and instruction.name not in ("DEPBAR", "BAR"):
            return
        for number, pending in enumerate(self.scoreboards):
            if instruction.wait >> number & 1 and pending:
                ready = max(ready, *pending)
        match = (
            re.match(r"(?:SB)(\d),? ?(0x[0-9a-f]+)?", instruction.operands) if instruction.name == "DEPBAR" else None
        )
        if match is not None:
            pending = sorted(self.scoreboards[int(match[1])])
            left = int(match[2] or "0", 16)
            ready = max([ready, *pending[: max(0, len(pending) - left)]])
        if instruction.name == "BAR":
            ready += BARRIER_LATENCY
        if ready > self.now:
            self._count_outstanding(ready)
        self.now = ready
        self.scoreboards = [[t for t in pending if t > self.now] for pending in self.scoreboards]

    def _count_outstanding(self, ready: float) -> None:
        """Notes the loads in flight when the warp stops for one of them."""
        flying = [size for done, size in self.outstanding if done > self.now]
        if any(self.now < done <= ready for done, _ in self.outstanding):
            self.most_loads = max(self.most_loads, len(flying))
            self.most_bytes = max(self.most_bytes, sum(flying))
        self.outstanding = [entry for entry in self.outstanding if entry[0] > ready]

    def _issue(self, instruction: Instruction) -> None:
        pipe = pipe_of(instruction)
        self.now = max(self.now, self.pipe_free.get(pipe, 0.0))
        self.pipe_free[pipe] = self.now + cost_of(instruction, self.gpu.architecture)
        latency = float(LATENCY.get(pipe, OTHER_LATENCY))
        if instruction.name in GLOBAL_LOADS:
            is_reread = self.has_rereads and self.arrivals.get(instruction.where, self.now + 1) <= self.now
            latency = L1_LATENCY if is_reread else self.global_latency
            self.arrivals.setdefault(instruction.where, self.now + latency)
            self.outstanding.append((self.now + latency, instruction.access_bits // 8))
        if instruction.name == "LDGSTS":
            self.copies.append(self.now + latency)
        if instruction.name == "LDGDEPBAR":
            self.scoreboards[0].append(max([self.now, *self.copies]))
            self.copies = []
        elif instruction.write_barrier != NO_BARRIER and instruction.write_barrier < 6:
            self.scoreboards[instruction.write_barrier].append(self.now + latency)
        if instruction.read_barrier < 6:
            self.scoreboards[instruction.read_barrier].append(self.now + OPERAND_LATENCY)
        self.now += max(1, instruction.stall)


@dataclass(frozen=True)
class Latency:
    """A warp alone in a loop: cycles per iteration, and its global loads in flight when it stops for one."""

    cycles: float
    loads_in_flight: int
    bytes_in_flight: int


def loop_latency(
    trace: Sequence[Instruction], gpu: Gpu, is_loop: bool = True, share: float = 1.0, has_rereads: bool = False
) -> Latency:
    """The cycles of a single warp for a sequence of instructions: once, or per iteration of a loop in its steady state.

    Args:
        trace: the instructions.
        is_loop: whether they are repeated.
        share: as for Timeline; has_rereads likewise.
    """
    timeline = Timeline(gpu, share, has_rereads)
    if not is_loop:
        cycles = timeline.run(trace)
    else:
        for _ in range(4):
            timeline.run(trace)
        cycles = sum(timeline.run(trace) for _ in range(4)) / 4
    return Latency(cycles, timeline.most_loads, timeline.most_bytes)


def occupancy(kernel: Kernel, threads: int, architecture: str, dynamic_shared: int = 0) -> int:
    """Warps of a kernel that are resident on an SM, with blocks of ``threads``."""
    warps = -(-threads // LANES)
    per_warp = -(-max(kernel.registers, 1) * LANES // 256) * 256
    # registers are handed out in units of 256 a warp, and warps to the four schedulers
    by_registers = REGISTERS // per_warp // SCHEDULERS * SCHEDULERS // warps
    shared = kernel.shared_bytes + dynamic_shared + RESERVED_SHARED_BYTES
    return warps * min(MAX_BLOCKS, MAX_WARPS // warps, by_registers, SHARED_BYTES[architecture] // shared)
