"""The calls whose speed tools/gpu_roofline.py predicts: their launches, the bytes these have to move, and which loop.

A rewritten kernel usually needs a new ``kernel`` pattern, another ``blocks``, and the ``bytes`` per element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["CASES", "Case", "Launch", "Torch"]


@dataclass(frozen=True)
class Launch:
    """One launch, or one pass of a launch over its elements.

    Attributes:
        kernel: regular expression over the demangled CUDA name with its template arguments, or ``name[label]`` of an
            AotCase of Triton.
        elements: what the launch handles, such as tokens.
        bytes: global bytes per element that it moves.
        blocks: blocks of the grid.
        threads: block size; 0 for the kernel's launch bound.
        shared: bytes of dynamic shared memory of a block.
        per_thread: elements of a thread in one iteration of the loop; 0 to derive it from the bytes of both.
        loop: which loop, as for ``hot_loop``; ``body`` for the whole kernel.
        trips: iterations of its inner loops, as in ``Route``.
        is_longest: whether the path with most instructions is taken through it, or that with fewest.
        through: regular expression over source lines, as ``folder/file:number text | opcode``, that the path visits
            where it can.
        avoid: regular expression over those that it avoids, such as those of a setting that the call does not use.
        has_rereads: whether a line that loads again finds its data in L1, as in passes over one tile.
        source: CUDA source below csrc; empty for the op's ``cuda.cu``.
        is_launch: False for a further pass of the same launch.
    """

    kernel: str
    elements: float
    bytes: float
    blocks: int
    threads: int = 0
    per_thread: float = 0
    loop: str = ""
    trips: tuple[tuple[str, int], ...] = ()
    is_longest: bool = True
    through: str = ""
    avoid: str = ""
    has_rereads: bool = False
    source: str = ""
    is_launch: bool = True
    shared: int = 0


@dataclass(frozen=True)
class Torch:
    """Launches of torch's own kernels, assumed to run at the speed of a copy."""

    what: str
    bytes: float
    launches: int


@dataclass(frozen=True)
class Case:
    """One call, with the bytes of its floor and the launches of each backend."""

    op: str
    name: str
    floor: float
    cuda: tuple[Launch | Torch, ...]
    triton: tuple[Launch | Torch, ...] = ()

    def source(self, launch: Launch) -> str:
        """The CUDA source of a launch, below csrc."""
        return launch.source or f"{self.op}/cuda.cu"


def token_logprobs() -> list[Case]:
    rows, columns = 8192, 151936
    logits = rows * columns
    row: dict[str, Any] = {"elements": logits, "blocks": rows}
    # the branch that rescales the sums when a larger logit turns up is rarely taken behind the first thousand
    usual: dict[str, dict[str, Any]] = {
        "forward": {"loop": r"pieces\[", "is_longest": False, "through": "where_equal"},
        "backward": {"loop": r"pieces\["},
    }

    def case(name: str, moved: int, cuda: str, label: str, kernel: str) -> Case:
        return Case(
            "token_logprobs",
            name,
            moved * logits,
            (Launch(rf"{kernel}_kernel<{cuda}>", bytes=moved, **row, **usual[kernel]),),
            (Launch(f"_{kernel}_kernel[{label}]", bytes=moved, loop="exp", **row),),
        )

    return [
        case("forward, bf16", 2, "BFloat16, false, false", "bf16", "forward"),
        case("backward, bf16", 4, "BFloat16, BFloat16, false, false", "bf16", "backward"),
        case("forward, bf16, softcap, entropy", 2, "BFloat16, true, true", "bf16, softcap, entropy", "forward"),
        case(
            "backward, bf16, softcap, entropy",
            4,
            "BFloat16, BFloat16, true, true",
            "bf16, softcap, entropy, in place",
            "backward",
        ),
        # for the products of a head in half precision
        case("forward, fp32", 4, "float, false, false", "fp32", "forward"),
        case("backward, fp32 to bf16", 6, "float, BFloat16, false, false", "fp32 to bf16", "backward"),
    ]


def logits_policy_loss() -> list[Case]:
    rows, columns, threads = 8192, 151936, 512
    logits = rows * columns
    # the loop that reads the row, and that which writes its gradient from shared memory
    row: dict[str, Any] = {"kernel": "rows_kernel<BFloat16, false, false>", "blocks": rows, "threads": threads}
    cuda = (
        Launch(elements=logits, bytes=2, loop=r"sums.*pieces\[", is_longest=False, through="where_equal", **row),
        Launch(elements=logits, bytes=2, loop=r"gradient.*pieces\[", is_launch=False, **row),
    )
    return [Case("logits_policy_loss", "clip, bf16", 4 * logits, cuda)]


def policy_loss() -> list[Case]:
    rows, width = 2048, 2048
    tokens, tasks = rows * width, rows * width // 1024
    record = 31 * 8
    # all four tokens of a step are valid
    whole: dict[str, Any] = {"is_longest": False, "through": "LDG.E.128", "per_thread": 4, "loop": "const float4"}
    cuda = (
        Launch("count_kernel<float>", tokens, 1, rows // 8, loop="__popc"),
        Launch(r"tokens_kernel<float, \(WalkKind\)4>", tokens, 17, tasks // 8, **whole),
        Launch("reduce_kernel<float>", tasks, record, 64, loop="records"),
    )
    triton = (
        Launch("rows_kernel[clip]", tokens, 1, rows, per_thread=8, loop=""),
        Launch("totals_kernel[clip]", rows, 40, 1, per_thread=2),
        Launch("tokens_kernel[clip]", tokens, 17, tasks, per_thread=4, loop="body"),
        Launch("gather_kernel[clip]", tasks, record, 512, per_thread=1 / 32),
        Launch("finish_kernel[clip]", 512, record, 1, per_thread=1 / 4),
    )
    count, _, reduce = cuda
    cispo = (count, Launch(r"tokens_kernel<float, \(WalkKind\)6>", tokens, 17, tasks // 8, **whole), reduce)
    # log-probs, old log-probs and the mask are read again while they are in a cache
    row: dict[str, Any] = {"kernel": r"sequences_kernel<\(WalkKind\)8>", "elements": tokens, "blocks": rows}
    gspo = (
        count,
        Launch(bytes=9, **(row | whole | {"loop": r"sum \+= is_valid"})),
        Launch(bytes=8, is_launch=False, **(row | whole | {"loop": "__stcg"})),
        Launch("reduce_kernel<float>", rows, record, 64, loop="records"),
    )
    return [
        Case("policy_loss", "4M tokens, clip, k3, metrics", 17 * tokens, cuda, triton),
        Case("policy_loss", "4M tokens, CISPO, k3, metrics", 17 * tokens, cispo),
        Case("policy_loss", "4M tokens, GSPO, k3, metrics", 17 * tokens, gspo),
    ]


def group_advantages() -> list[Case]:
    many, few = 1 << 24, 1 << 16
    # four rows of a thread, the longest way through the kernel but for settings and inputs that the calls do not have
    unused = r"(arrays\.parent|baselines\[|lengths\[|subgroups).*LDG|sums\[j\]|(second|length.*) = __shfl|LeaveOneOut"
    quads: dict[str, Any] = {"per_thread": 4, "loop": "body", "through": r"pieces\[p\]|to\[row"}
    quads["avoid"] = unused + r"|order\[.*LDG"
    # a thread has one quad; what would load the next one costs nothing
    step: dict[str, Any] = quads | {"has_rereads": True}
    step["avoid"] += r"|other\.(weight|mean|m2).*LDG|map\.mean \+ plan\.eps|Whiten::kTokens|nonzero|moments\.merge"
    partials: dict[str, Any] = step | {"through": r"partials\[blockIdx|1u << "}
    whole = Launch("groups_kernel<float, true, true, false>", many, 21, many // 1024, **quads)
    cuda = (
        Launch("groups_kernel<float, true, false, false>", few, 21, few // 1024, **partials),
        Launch("finish_kernel<float, true>", few, 17, few // 1024, **step),
    )
    tiles = Launch("groups_kernel[groups of 8]", many, 21, many // 512, per_thread=4, loop="body")
    batch = (
        Launch("groups_kernel[groups of 8]", few, 21, few // 512, per_thread=4, loop="body"),
        Launch("moments_kernel", few, 13, few // 1024, per_thread=8),
        Launch("finish_kernel", few, 17, few // 1024, per_thread=8, loop="body"),
    )
    # eight passes of a radix sort over keys and positions, and the runs of equal ids
    sort = Torch("stable sort of int64 ids, runs of equal ids", (8 * 32 + 8 + 60) * many, 10 + 9)
    # a block takes 1,024 positions, which it finds in five steps, and two lanes a group of them; rows in random order
    # cost a sector of 32 bytes in each of six arrays
    ids: dict[str, Any] = quads | {"avoid": unused, "has_rereads": True, "trips": (("items.first", 5),)}
    by_id = Launch("groups_kernel<float, false, true, false>", many, 8 + 6 * 32, many // 1024, **ids)
    by_id_triton = Launch("groups_kernel[subgroups]", 32 * many, 45 / 32, many // 4, per_thread=1, loop="body")
    return [
        Case("group_advantages", "16M rewards, groups of 8", 21 * many, (whole,), (tiles,)),
        Case("group_advantages", "65,536 rewards, batch step", 21 * few, cuda, batch),
        Case("group_advantages", "16M rewards, unsorted ids", 29 * many, (sort, by_id), (sort, by_id_triton)),
    ]


def endpoint_segments() -> list[Case]:
    rows, width = 512, 8192
    tokens = rows * width
    segments = tokens // 8  # each has 16 bytes of working memory
    segments_kernel: dict[str, Any] = {"kernel": "segments_kernel<float, 256, true>", "blocks": rows}
    tiles: dict[str, Any] = {"elements": tokens, "blocks": rows, "per_thread": 8, "avoid": "j < count"}
    # a quarter of a block's warps walk, in groups of eight tokens, and with so many segments about three times in all
    walks: dict[str, Any] = {"elements": tokens, "bytes": 0, "threads": 64, "per_thread": 8 / 3, "loop": "opens_next"}
    cuda = (
        Launch("tokens_kernel<float, 256, true>", bytes=22, loop=r"returns \+ at", **tiles),
        Launch("scale_kernel<float>", rows, 16, 1, per_thread=1),
        # rewards and values are read again while they are in a cache
        Launch(bytes=24, loop=r"segment_ids \+ at", trips=(("opens_next", 0),), **(segments_kernel | tiles)),
        Launch(is_launch=False, **(segments_kernel | walks)),
        Launch(elements=segments, bytes=24, per_thread=1, loop="deviation", is_launch=False, **segments_kernel),
        Launch("moments_kernel<float>", rows, 40, 1, per_thread=1),
        Launch("results_kernel<float>", tokens, 11, rows * 8, per_thread=4, avoid="j < count|returns"),
    )
    tile: dict[str, Any] = {"elements": tokens, "blocks": rows, "per_thread": 2}
    triton = (
        Launch("_tokens_kernel[packed, critic]", bytes=29, **tile),
        Launch("_scale_kernel", rows, 16, 1, per_thread=8),
        Launch("_cuts_kernel[1, 0]", tokens, 21, rows, per_thread=1, trips=(("", 3),)),
        Launch("_credits_kernel[packed, critic]", bytes=17, **tile),
        Launch("_moments_kernel[batch]", rows, 40, 1, per_thread=8),
        Launch("_results_kernel[endpoint]", tokens, 18, rows * 16, per_thread=4),
    )
    return [Case("endpoint_segments", "512 x 8,192, critic, batch norm", 30 * tokens, cuda, triton)]


def token_advantages() -> list[Case]:
    rows, width = 512, 8192
    tokens = rows * width
    tiles: dict[str, Any] = {"elements": tokens, "blocks": rows, "per_thread": 8, "avoid": "j < count"}
    cuda = (
        Launch("walk_kernel<float, 256, true, false>", bytes=17, loop=r"returns \+ at", **tiles),
        Launch("norm_kernel<float>", rows, 40, 1, per_thread=1),
        Launch("whiten_kernel<float, 256>", bytes=9, **tiles),
    )
    tile: dict[str, Any] = {"elements": tokens, "blocks": rows, "per_thread": 4}
    triton = (
        Launch("_walk_kernel[packed]", bytes=17, **tile),
        Launch("_norm_kernel", rows, 40, 1, per_thread=8),
        Launch("_whiten_kernel[packed]", bytes=9, **tile),
    )
    return [Case("token_advantages", "512 x 8,192, critic, whitened", 26 * tokens, cuda, triton)]


def sampling_correction() -> list[Case]:
    rows, width = 2048, 2048
    tokens = rows * width
    # a block measures its row, and reads it again from a cache to write its weights; neither the divergence of two
    # outcomes nor a rejection of tokens, the longer ways, is asked for
    row: dict[str, Any] = {"kernel": "rows_kernel<float>", "elements": tokens, "blocks": rows, "per_thread": 1}
    row |= {"is_longest": False, "through": "LDG|STG|MUFU.EX2"}
    cuda = (
        Launch(bytes=9, loop=r"sums\.k3 \+= ", **row),
        Launch(bytes=5, loop=r"M::store\(in\.weights", is_launch=False, **row),
    )
    return [Case("sampling_correction", "4M tokens, token weights", 14 * tokens, cuda)]


def similarity_groups() -> list[Case]:
    return [
        *(cosines(responses, width, "bf16") for responses in (16, 64, 256) for width in (384, 1024, 4096)),
        *(cosines(responses, 1024, "fp32") for responses in (64, 256)),
        *(clusters(1024, responses) for responses in (16, 64, 256)),
    ]


def cosines(responses: int, width: int, dtype: str, prompts: int = 1024) -> Case:
    """The distances of prompts whose embeddings are contiguous and of which all are in use."""
    type_, item = {"bf16": ("BFloat16", 2), "fp32": ("float", 4)}[dtype]
    values, columns = prompts * responses * width, 128 // item  # a chunk is 128 bytes of a row
    # the distances are written once for each row
    floor = item * values + 4 * prompts * responses**2
    usual: dict[str, Any] = {"bytes": floor / values, "source": "similarity_groups/pairwise_cosine.cu"}
    avoid = r"items\[k\]|memcpy|in\.valid|offsets|order"
    if responses <= 64:
        bands = responses // 16
        # a warp turns 16 rows of a chunk into products at a time
        tile: dict[str, Any] = {"kernel": f"cosine_kernel<{type_}, Shape<{bands}, true>", "blocks": prompts}
        launches = [tile | {"elements": values, "per_thread": columns * 16 / 32, "loop": "HMMA", "avoid": avoid}]
    else:
        bands = 4 if dtype == "fp32" else 8
        tiles, threads = responses // (16 * bands), 32 * bands
        # both kinds of tiles, from the first instruction to the last; the bytes are shared out by their number
        whole: dict[str, Any] = {
            "kernel": f"cosine_kernel<{type_}, Shape<{bands}, false>",
            "loop": "body",
            "trips": (("HMMA", width // columns),),
            "shared": (3 if bands == 8 else 4) * 2 * 16 * bands * 128,
        }
        diagonal, above = prompts * tiles, prompts * tiles * (tiles - 1) // 2
        kinds = (
            (above, r"inverses\[column\]", True),
            (diagonal, r"in\.status\[", False),
        )
        launches = [
            whole
            | {
                "elements": values * blocks / (above + diagonal),
                "blocks": blocks,
                "per_thread": values / (above + diagonal) / threads,
                "through": through,
                "avoid": avoid,
                "is_launch": is_launch,
            }
            for blocks, through, is_launch in kinds
        ]
    name = f"cosines of {prompts:,} x {responses} x {width:,}, {dtype}"
    return Case("similarity_groups", name, floor, tuple(Launch(**(usual | launch)) for launch in launches))


def clusters(prompts: int, responses: int) -> Case:
    """The groups of prompts of which all cuts of the tree of average linkage are tried."""
    warps, pairs = -(-responses // 32), responses**2
    is_shared, is_exhaustive, threads = responses <= 161, responses <= 96, 32 * warps
    doubles = (2 + 2 * warps) * responses + 1 + is_shared * responses * (responses | 1)
    # all lanes search the nearest cluster of their item, or a warp those of the items whose nearest cluster was merged
    avoid = r"search_for" if is_exhaustive else r"column\[\(first"
    kernel: dict[str, Any] = {
        "kernel": f"cluster_kernel<{str(warps == 1).lower()}, {str(is_shared).lower()}>",
        "blocks": prompts if is_shared else min(prompts, 256),
        "threads": threads,
        "per_thread": 1,
        "shared": 8 * doubles + 16 * 8 + 4 * 5 * responses,
    }
    each = prompts * threads
    # what happens once: both matrices are read 16 rows at a time, and two loops compare 16 numbers at a time
    sixteenths = tuple((line, responses // 16) for line in (r"work\.positions\[min", r"scores\[k\]", r"rank \+= "))
    once = Launch(elements=each, bytes=8 * pairs / threads, loop="body", trips=sixteenths, **kernel)
    more: dict[str, Any] = {"bytes": 0, "is_launch": False, **kernel}
    passes = [
        once,
        # each merge has a search; with responses around three points, the longest warp has two and a half, and the
        # first merge 32
        Launch(elements=each * (responses - 2), loop=r"na \* ac \+ nb", **more),
        Launch(elements=each * (1.5 * responses + 31), loop=r"return row\[j\]", **more),
        # half of the clusters are left on average, eight at a time
        Launch(
            elements=each * (responses - 3),
            loop="sum_into = column",
            trips=((r"column\[\(first", responses // 16),),
            avoid=avoid,
            **more,
        ),
    ]
    if not is_exhaustive:  # 0.045 searches for each pair of responses, of which a warp has an eighth; the first cut 32
        searches = 0.045 * pairs / warps - responses + 31
        passes.append(Launch(elements=each * searches, loop=r"return cuts\.sums\[", **more))
    return Case("similarity_groups", f"clusters of {prompts:,} x {responses}", 4 * prompts * pairs, tuple(passes))


CASES = [
    *token_logprobs(),
    *logits_policy_loss(),
    *policy_loss(),
    *group_advantages(),
    *endpoint_segments(),
    *token_advantages(),
    *sampling_correction(),
    *similarity_groups(),
]
