"""Reads cubins: machine code, its control information, control flow and loops, and what each kernel uses.

Only nvdisasm is needed, which comes with the CUDA toolkit and with Triton, and no GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

__all__ = ["Block", "Instruction", "Kernel", "Loop", "Route", "find_nvdisasm", "parse_kernel", "read_cubin"]

INSTRUCTION_BYTES = 16
NO_BARRIER = 7
RESERVED_SHARED_BYTES = 1024  # of every block, from sm_80 on
# Attributes of .nv.info, as nvdisasm names them.
EIATTR_MAX_THREADS, EIATTR_FRAME_SIZE, EIATTR_REGCOUNT = 0x05, 0x11, 0x2F
ACCESSES = ("LDG", "LD", "LDS", "LDL", "STG", "ST", "STS", "STL")
# A block with a call to one of these handles denormals and other rare operands.
SLOW_PATH = re.compile(r"CALL\.\S+ .*\$?__(internal|cuda)")
COLD, VISIT = 10**6, 10**8  # instructions that a block to avoid, or to visit, counts as


@dataclass(frozen=True)
class Instruction:
    """One instruction with its control information.

    Attributes:
        opcode: mnemonic with modifiers, such as ``LDG.E.128``.
        predicate: guard, such as ``@!P0``, or an empty string.
        line: source line as ``path:number``, of the innermost inlined function.
        stall: cycles until the same warp may issue the next instruction.
        write_barrier: scoreboard that is released when the result arrives, 7 for none.
        read_barrier: scoreboard that is released when the operands are read, 7 for none.
        wait: bit mask of the scoreboards that must be released before issue.
    """

    address: int
    opcode: str
    operands: str = ""
    predicate: str = ""
    line: str = ""
    stall: int = 1
    write_barrier: int = NO_BARRIER
    read_barrier: int = NO_BARRIER
    wait: int = 0

    @functools.cached_property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> frozenset[str]:
        return frozenset(self.opcode.split(".")[1:])

    @functools.cached_property
    def access_bits(self) -> int:
        """Bits that each thread reads or writes, for loads and stores."""
        if self.name == "LDSM":  # 8 x 8 matrices, a word a thread of each
            return 32 * max((int(m) for m in self.modifiers & {"1", "2", "4"}), default=1)
        widths = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
        return max((widths[m] for m in self.modifiers if m in widths), default=32)

    @property
    def is_slow_path_call(self) -> bool:
        return SLOW_PATH.match(f"{self.opcode} {self.operands}") is not None

    def is_skipped(self, route: Route) -> bool:
        """Whether it is an access, guarded by a predicate, of a line that the route avoids."""
        is_guarded_access = bool(self.predicate) and self.name in ACCESSES
        return is_guarded_access and bool(route.avoid) and re.search(route.avoid, self.tag) is not None

    @property
    def where(self) -> str:
        """The source line as ``folder/file:number text``."""
        return _where(self.line)

    @property
    def tag(self) -> str:
        """The source line and the opcode, as ``folder/file:number text | opcode``, which routes are matched with."""
        return f"{self.where} | {self.opcode}"


@functools.cache
def _where(line: str) -> str:
    path, _, number = line.rpartition(":")
    lines = _source(path)
    text = lines[int(number) - 1].strip() if number and int(number) <= len(lines) else ""
    return f"{Path(path).parent.name}/{Path(path).name}:{number} {text}" if path else ""


@functools.cache
def _source(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []


@dataclass(frozen=True)
class Route:
    """Which of the paths through a loop is taken, by the tags of instructions: their source lines and opcodes.

    Attributes:
        is_longest: the one with most instructions rather than that with fewest.
        trips: iterations of loops inside the loop: the number for the innermost ones with a tag that matches, else 1.
        through: regular expression over tags; blocks with such an instruction are visited where possible.
        avoid: regular expression over tags; blocks that access memory in one, or have no
            other, are avoided where possible, and accesses under a predicate are left out.
    """

    is_longest: bool = True
    trips: tuple[tuple[str, int], ...] = ()
    through: str = ""
    avoid: str = ""


@dataclass
class Block:
    """A basic block: instructions without a branch between them."""

    instructions: list[Instruction]
    successors: list[int] = field(default_factory=list)

    def weight(self, route: Route) -> int:
        """The block's share of the length of the longest path."""
        weight = len(self.instructions) if route.is_longest else -len(self.instructions)
        lines = {i.tag for i in self.instructions} if route.through or route.avoid else set()
        if route.through and any(re.search(route.through, line) for line in lines):
            weight += VISIT
        if route.avoid:
            # an access is what such a block is for; its other lines may be of code that was moved there
            accesses = {i.tag for i in self.instructions if i.name in ACCESSES}
            avoided = {line for line in lines if re.search(route.avoid, line)}
            weight -= COLD if avoided & accesses or avoided == lines else 0
        if any(i.is_slow_path_call for i in self.instructions):
            weight -= COLD
        return weight


DEFAULT_ROUTE = Route()


@dataclass(frozen=True)
class Loop:
    """A natural loop; loops with the same header are one. The whole kernel is a loop with header 0 and no latches."""

    header: int
    blocks: frozenset[int]
    latches: frozenset[int]
    depth: int = 0


@dataclass
class Kernel:
    """A kernel's code and resources; ``max_threads`` is 0 if the source does not bound its block."""

    name: str
    blocks: list[Block]
    demangled: str = ""
    registers: int = 0
    shared_bytes: int = 0
    frame_bytes: int = 0
    max_threads: int = 0
    loops: list[Loop] = field(default_factory=list)

    @property
    def instructions(self) -> list[Instruction]:
        return [i for block in self.blocks for i in block.instructions]

    @property
    def body(self) -> Loop:
        """The whole kernel, as a loop that runs once."""
        return Loop(0, frozenset(range(len(self.blocks))), frozenset())

    def trace(self, loop: Loop, route: Route = DEFAULT_ROUTE, without: Loop | None = None) -> list[Instruction]:
        """Instructions of one path through one iteration of a loop, in order.

        Args:
            loop: the loop.
            route: which path.
            without: an inner loop that is on the path, but left out.
        """
        path = _path(self.blocks, loop, route, None if without is None else without.header)
        inner = [other for other in self.loops if other.blocks < loop.blocks]
        outer = [a for a in inner if not any(a.blocks < b.blocks for b in inner)]
        out: list[Instruction] = []
        position = 0
        while position < len(path):
            nested = next((a for a in outer if path[position] in a.blocks), None)
            if nested is None:
                out += [i for i in self.blocks[path[position]].instructions if not i.is_skipped(route)]
                position += 1
                continue
            if without is None or nested.blocks != without.blocks:
                contains = without is not None and without.blocks < nested.blocks
                out += self.trace(nested, route, without) * (1 if contains else self._trips(nested, route))
            while position < len(path) and path[position] in nested.blocks:
                position += 1
        return out

    def _trips(self, loop: Loop, route: Route) -> int:
        def has(a: Loop, pattern: str) -> bool:
            return any(re.search(pattern, i.tag) for n in a.blocks for i in self.blocks[n].instructions)

        inner = [other for other in self.loops if other.blocks < loop.blocks]
        return next((n for line, n in route.trips if has(loop, line) and not any(has(a, line) for a in inner)), 1)


def find_nvdisasm() -> str | None:
    """Path of nvdisasm: of the toolkit, else of the installed Triton."""
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda") + "/bin"
    path = shutil.which("nvdisasm") or shutil.which("nvdisasm", path=toolkit)
    spec = importlib.util.find_spec("triton") if path is None else None
    if spec is not None and spec.origin is not None:
        path = shutil.which("nvdisasm", path=str(Path(spec.origin).parent / "backends" / "nvidia" / "bin"))
    return path


def demangle(names: Sequence[str]) -> list[str]:
    """C++ names as the source spells them, or as they are without c++filt."""
    tool = shutil.which("c++filt") or shutil.which("cu++filt")
    if tool is None or not names:
        return list(names)
    done = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    return [re.sub(r"grpo_kernels::|\(anonymous namespace\)::", "", line) for line in done.stdout.splitlines()]


# --- ELF


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int


def _sections(data: bytes) -> list[_Section]:
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    table = struct.unpack_from("<Q", data, 40)[0]
    size, count, names = struct.unpack_from("<3H", data, 58)
    raw = [struct.unpack_from("<IIQQQQII", data, table + n * size) for n in range(count)]
    strings = raw[names][4]
    return [_Section(_string(data, strings + r[0]), r[1], r[4], r[5], r[6]) for r in raw]


def _string(data: bytes, at: int) -> str:
    return data[at : data.index(b"\0", at)].decode()


def _attributes(data: bytes, section: _Section) -> Iterable[tuple[int, bytes]]:
    at, end = section.offset, section.offset + section.size
    while at < end:
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == 4:  # a payload of `value` bytes follows
            yield attribute, data[at : at + value]
            at += value


def _symbols(data: bytes) -> list[str]:
    """Names of all symbols, by index."""
    sections = _sections(data)
    table = next(s for s in sections if s.name == ".symtab")
    strings = sections[table.link].offset
    starts = range(table.offset, table.offset + table.size, 24)
    return [_string(data, strings + struct.unpack_from("<I", data, at)[0]) for at in starts]


def _read_resources(data: bytes) -> dict[str, dict[str, int]]:
    sections, symbols = _sections(data), _symbols(data)
    found: dict[str, dict[str, int]] = {}

    def entry(name: str) -> dict[str, int]:
        return found.setdefault(name, {"registers": 0, "shared_bytes": 0, "frame_bytes": 0, "max_threads": 0})

    for section in sections:
        if section.name == ".nv.info":
            for attribute, value in _attributes(data, section):
                if attribute in (EIATTR_REGCOUNT, EIATTR_FRAME_SIZE):
                    index, count = struct.unpack("<II", value)
                    entry(symbols[index])["registers" if attribute == EIATTR_REGCOUNT else "frame_bytes"] = count
        elif section.name.startswith(".nv.info."):
            for attribute, value in _attributes(data, section):
                if attribute == EIATTR_MAX_THREADS:
                    x, y, z = struct.unpack("<III", value)
                    entry(section.name.removeprefix(".nv.info."))["max_threads"] = x * y * z
        elif section.name.startswith(".nv.shared."):
            entry(section.name.removeprefix(".nv.shared."))["shared_bytes"] = section.size
    return found


# --- machine code


def _control(code: bytes, address: int) -> dict[str, int]:
    """Control information in the upper bits of an instruction's second word (Volta to Blackwell)."""
    bits = int.from_bytes(code[address : address + INSTRUCTION_BYTES], "little") >> 105
    return {
        "stall": bits & 15,
        "write_barrier": bits >> 5 & 7,
        "read_barrier": bits >> 8 & 7,
        "wait": bits >> 11 & 63,
    }


_CODE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x?_?\w+|\S+):\s*$")
_LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
_TARGETS = re.compile(r"\.L_x?_?\w+")
_JUMPS = {"BRA", "BRX", "JMP", "JMX"}
_ENDS = {"EXIT", "RET", "KILL"}


def parse_kernel(name: str, text: str, code: bytes = b"") -> Kernel:
    """Builds the control flow of one kernel from nvdisasm's text and, for control information, its machine code."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    line = ""
    has_line = False
    for row in text.splitlines():
        if match := _LINE.search(row):
            # the first of several is the innermost inlined function, and headers of the system tell nothing
            if not has_line and not match[1].startswith("/usr/"):
                line = f"{match[1]}:{match[2]}"
                has_line = True
        elif match := _CODE.match(row):
            address = int(match[1], 16)
            guard = (match[2] or "").strip()
            made = Instruction(address, match[3], match[4], "" if guard == "@PT" else guard, line)
            instructions.append(replace(made, **_control(code, address)) if code else made)
            has_line = False
        elif match := _LABEL.match(row):
            labels[match[1]] = len(instructions)
    kernel = Kernel(name, _blocks(instructions, labels))
    kernel.loops = find_loops(kernel.blocks)
    return kernel


def _targets(instruction: Instruction, labels: dict[str, int]) -> list[int]:
    """Indices that a jump may go to. A divergent branch only handles warps that have not reconverged: no edge."""
    if instruction.name not in _JUMPS or "DIV" in instruction.modifiers:
        return []
    return [labels[label] for label in _TARGETS.findall(instruction.operands) if label in labels]


def _blocks(instructions: list[Instruction], labels: dict[str, int]) -> list[Block]:
    starts = {0}
    for index, instruction in enumerate(instructions):
        targets = _targets(instruction, labels)
        starts.update(targets)
        if targets or instruction.name in _ENDS:
            starts.add(index + 1)
    order = sorted(s for s in starts if s < len(instructions))
    number = {start: n for n, start in enumerate(order)}
    blocks = []
    for n, start in enumerate(order):
        end = order[n + 1] if n + 1 < len(order) else len(instructions)
        last = instructions[end - 1]
        to = [number[t] for t in _targets(last, labels) if t in number]
        is_conditional = bool(last.predicate) or re.match(r"!?U?P\d", last.operands) is not None
        ends = last.name in (_JUMPS | _ENDS) and "DIV" not in last.modifiers and not is_conditional
        if not ends and n + 1 < len(order):
            to.append(n + 1)
        blocks.append(Block(instructions[start:end], sorted(set(to))))
    return blocks


def dominators(blocks: Sequence[Block]) -> list[set[int]]:
    """The blocks through which every path from the entry to each block leads; empty for unreachable ones."""
    predecessors: list[list[int]] = [[] for _ in blocks]
    for n, block in enumerate(blocks):
        for to in block.successors:
            predecessors[to].append(n)
    order = _reverse_postorder(blocks)
    result: list[set[int]] = [set() for _ in blocks]
    result[0] = {0}
    changed = True
    while changed:
        changed = False
        for n in order[1:]:
            known = [result[p] for p in predecessors[n] if result[p]]
            new = {n} | (set.intersection(*known) if known else set())
            if new != result[n]:
                result[n], changed = new, True
    return result


def _reverse_postorder(blocks: Sequence[Block]) -> list[int]:
    seen, order = {0}, []
    stack = [(0, iter(blocks[0].successors))]
    while stack:
        n, successors = stack[-1]
        new = next((s for s in successors if s not in seen), None)
        if new is None:
            order.append(n)
            stack.pop()
        else:
            seen.add(new)
            stack.append((new, iter(blocks[new].successors)))
    return order[::-1]


def find_loops(blocks: Sequence[Block]) -> list[Loop]:
    """Natural loops, innermost first."""
    if not blocks:
        return []
    dominated_by = dominators(blocks)
    predecessors: list[list[int]] = [[] for _ in blocks]
    latches: dict[int, set[int]] = {}
    for n, block in enumerate(blocks):
        for to in block.successors:
            predecessors[to].append(n)
            if to in dominated_by[n] and dominated_by[n]:
                latches.setdefault(to, set()).add(n)
    loops = []
    for header, ends in latches.items():
        members, pending = {header}, [n for n in ends if n != header]
        while pending:
            n = pending.pop()
            if n not in members:
                members.add(n)
                pending += [p for p in predecessors[n] if dominated_by[p]]
        loops.append(Loop(header, frozenset(members), frozenset(ends)))
    # the endless loop behind the last EXIT only pads the code
    loops = [a for a in loops if any(i.name != "BRA" for n in a.blocks for i in blocks[n].instructions)]
    deep = [replace(a, depth=1 + sum(a.blocks < b.blocks for b in loops)) for a in loops]
    return sorted(deep, key=lambda a: (-a.depth, a.header))


def _path(blocks: Sequence[Block], loop: Loop, route: Route, via: int | None = None) -> list[int]:
    """The longest or shortest path from the header to a latch or, for a whole kernel, to its end.

    It calls no slow path for rare operands if that can be avoided, and leads through the block ``via``.
    """
    order = [n for n in _reverse_postorder(blocks) if n in loop.blocks]
    place = {n: i for i, n in enumerate(order)}
    weights = {n: blocks[n].weight(route) + (VISIT if n == via else 0) for n in order}
    best: dict[int, tuple[int, int | None]] = {}
    for n in order:
        if n == loop.header:
            best[n] = (0, None)
        if n not in best:
            continue
        for to in blocks[n].successors:
            # edges back are those against the order
            length = best[n][0] + weights.get(to, 0)
            if place.get(to, -1) > place[n] and (to not in best or best[to][0] < length):
                best[to] = (length, n)
    ends = [n for n in best if (n in loop.latches if loop.latches else not blocks[n].successors)]
    last: int | None = max(ends or best, key=lambda n: best[n][0])
    path = []
    while last is not None:
        path.append(last)
        last = best[last][1]
    return path[::-1]


def read_cubin(path: Path, pattern: str = "") -> list[Kernel]:
    """Kernels of a cubin whose demangled name matches ``pattern`` (a regular expression, searched)."""
    tool = find_nvdisasm()
    if tool is None:
        raise FileNotFoundError("nvdisasm: found neither in the CUDA toolkit nor in Triton")
    data = path.read_bytes()
    code = {s.name.removeprefix(".text."): s for s in _sections(data) if s.name.startswith(".text.")}
    names = list(code)
    chosen = {n: d for n, d in zip(names, demangle(names), strict=True) if re.search(pattern, d)}
    resources = _read_resources(data)
    indices = ",".join(str(n) for n, name in enumerate(_symbols(data)) if name in chosen)
    if not indices:
        return []
    command = [tool, "-c", "-gi", "-fun", indices, str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    target = re.search(r"\.target\s+sm_(\d+)", text)
    is_reserved = target is not None and int(target[1]) >= 90
    kernels = []
    for part in re.split(r"^//-+ \.text\.", text, flags=re.MULTILINE)[1:]:
        name = part.split(None, 1)[0]
        if name not in chosen:
            continue
        section = code[name]
        kernel = parse_kernel(name, part, data[section.offset : section.offset + section.size])
        kernel.demangled = chosen[name]
        for key, value in resources.get(name, {}).items():
            setattr(kernel, key, value)
        # from sm_90 on, the section includes what the driver reserves
        if is_reserved and kernel.shared_bytes >= RESERVED_SHARED_BYTES:
            kernel.shared_bytes -= RESERVED_SHARED_BYTES
        kernels.append(kernel)
    return sorted(kernels, key=lambda kernel: names.index(kernel.name))
