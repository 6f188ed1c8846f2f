"""docs/compile_decode.md: what decoding costs on devices that are not present, by their compilers.

    python -m benchmarks.compilers.decode --folder=/tmp/compile_decode [--only=8b]

Compiles the decode programs (an autoregressive step, draft, head, verify of 17 and of 64 rows, a whole round; head and
round with few candidates and over the whole vocabulary) from shapes alone, at batch 1 and a cache of 4,096 slots in
bfloat16. Every entry is compiled in a separate process and leaves one JSON in --folder, so the script can be stopped
and started again. It then rewrites its part of docs/compile_decode.md. It needs requirements-compile.txt. No figure is
a measurement.
"""

import argparse
import dataclasses
import datetime
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.compilers import compiler_text, hbm_traffic
from benchmarks.compilers import decode_tables as compile_decode_tables
from benchmarks.compilers.collectives import collectives
from domino_jax.forecast import compiled, dry_run, topologies
from domino_jax.method.config import DrafterConfig
from domino_jax.method.drafter import Drafter, init_drafter_params, rows_together
from domino_jax.method.loop import DecodeState, Prompts, prefill
from domino_jax.method.pair import Models
from domino_jax.method.propose import draft_base, roll_out_head
from domino_jax.method.rounds import autoregressive_round, speculative_round
from domino_jax.method.sampling import request_keys
from domino_jax.method.settings import DraftSettings, SamplingParams
from domino_jax.method.verify import verify
from domino_jax.models import sharding
from domino_jax.models.cache import slots_of
from domino_jax.models.qwen3 import Qwen3
from domino_jax.training.estimates import device_bytes

ROOT = pathlib.Path(__file__).resolve().parents[2]
# (size, chip, tensor parallelism) and, for decode.mesh.split_head, "split"; the most informative first.
ENTRIES = (
    ("8b", "v5p", 1),
    ("8b", "h200", 1),
    ("8b", "v5p", 4),
    ("8b", "v5p", 4, "split"),
    ("8b", "v5p", 8),
    ("0.6b", "h200", 1),
    ("0.6b", "v5p", 1),
    ("8b", "v6e", 1),
    ("8b", "v5e", 8),
    ("4b", "h200", 1),
    ("4b", "v5p", 1),
    ("4b", "v6e", 1),
    ("4b", "v5p", 4),
    ("4b", "v5p", 8),
)
# Eight chips of each kind, of which an entry takes the first 1, 4 or 8.
SLICES = {"v5p": "v5p:2x2x2", "v5e": "v5e:2x4", "v6e": "v6e:2x4", "h200": "h200"}
CACHES = {"h200": 50 * 2**20}  # bytes of L2, by the data sheet
SLOTS, BUFFER, BLOCK = 4096, 2048, 16
CANDIDATES = (64, 16, 256)  # of a head, the recipes' first
PROGRAMS = 7 + len(CANDIDATES)
GREEDY = SamplingParams()


def drafting(candidates: int = CANDIDATES[0]) -> DraftSettings:
    """A greedy chain; 0 candidates: the whole vocabulary."""
    return DraftSettings(scale=float("inf"), head_candidates=candidates)


def name(entry: tuple) -> str:
    size, chip, tensor, *split = entry
    return "-".join([size, chip, "".join([f"tp{tensor}", *split])])


# ------------------------------------------------------------------------------------------------------ programs


def models_on(mesh: Mesh, size: str, layers: int | None = None, split_head: bool = False) -> Models:
    """Shapes of the published drafter's form beside a target.

    layers: fewer than the target has, for a test.  split_head: as decode.mesh.split_head.
    """
    target_config = dry_run.shapes_of(f"Qwen/Qwen3-{size.upper()}")
    if layers:
        target_config = dataclasses.replace(target_config, num_hidden_layers=layers)
    config = DrafterConfig.for_target(
        target_config,
        num_layers=min(5, layers or 5),
        target_layer_ids=None if layers is None else (0, 1),
        block_size=BLOCK,
        head="domino",
        shift_label=True,
        pure_draft_prefix_len=1,
        emb_dim=256,
        gru_hidden_dim=1024,
    )
    target = Qwen3(target_config, jnp.bfloat16)
    drafter = Drafter(config, jnp.bfloat16, whole_head=mesh.size > 1 and not split_head)
    shapes = jax.eval_shape(lambda: init_drafter_params(drafter, jax.random.key(0)))
    tied = target_config.tie_word_embeddings
    place = sharding.decode_placement(mesh, config.num_key_value_heads, tied, split_head)

    def laid_out(tree):
        def one(path, leaf):
            where = place([part.key for part in path], leaf.shape)
            return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=where)

        return jax.tree_util.tree_map_with_path(one, tree)

    return Models(target, laid_out(dry_run.target_shapes(target, mesh)), drafter, rows_together(laid_out(shapes)))


def placed(shapes, places, dtype=None):
    return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=to), shapes, places)


def array(mesh: Mesh, *shape: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.replicated(mesh))


def state_on(mesh: Mesh, models: Models, slots: int = SLOTS, rows: int = 1) -> DecodeState:
    """Shapes of the state of some requests with caches of `slots` slots."""
    start = functools.partial(prefill, slots=slots, buffer=BUFFER, sampling=GREEDY)
    state = jax.eval_shape(start, models, prompts_on(mesh, rows, 16), array(mesh, 1))
    return placed(state, sharding.decode_layout(mesh, state))


def prompts_on(mesh: Mesh, rows: int, tokens: int) -> Prompts:
    numbers = array(mesh, rows)
    keys = jax.eval_shape(request_keys, numbers, numbers).dtype
    return Prompts(array(mesh, rows, tokens), numbers, numbers, array(mesh, rows, dtype=keys))


def programs(mesh: Mesh, models: Models) -> dict[str, tuple]:
    """name → (function, arguments); argument 1 is donated, but the head's drafted block, which no result can reuse.

    head and round correct the whole vocabulary; a number after their name is that of the candidates. They are called as
    their programs are: the compilers' files are found by it.
    """
    state, plain = state_on(mesh, models), Models(models.target, models.target_params)
    bare = state.replace(draft_cache=())
    config, stop = models.drafter.config, array(mesh, 1)
    taps = config.target_layer_ids
    z = array(mesh, 1, config.num_drafts, config.hidden_size, dtype=jnp.bfloat16)
    base = array(mesh, 1, config.num_drafts, config.vocab_size, dtype=jnp.float32)

    def step(models, state, stop):
        return autoregressive_round(models, state, stop, GREEDY)

    def draft(models, cache, state):
        return draft_base(models, state.replace(draft_cache=cache))

    def head(candidates):
        def roll_out(models, drafted, state):
            return roll_out_head(models, state, *drafted, GREEDY, drafting(candidates))

        return roll_out

    def check(models, cache, tokens, lengths):
        out = verify(models, cache, tokens, lengths, tap_layers=taps)
        return jnp.argmax(out.logits, -1), out.features, out.cache

    def round_of(candidates):
        def whole_round(models, state, stop):
            return speculative_round(models, state, stop, GREEDY, drafting(candidates))

        return whole_round

    narrow = bare.replace(target_cache=())
    rows = {width: array(mesh, 1, width) for width in (17, 64)}
    found = {
        "step": (step, (plain, bare, stop)),
        f"round{CANDIDATES[0]}": (round_of(CANDIDATES[0]), (models, state, stop)),
        **{f"head{count}": (head(count), (models, (z, base), narrow)) for count in CANDIDATES},
        "head": (head(0), (models, (z, base), narrow)),
        "round": (round_of(0), (models, state, stop)),
        **{f"verify{width}": (check, (models, state.target_cache, rows[width], state.lengths)) for width in rows},
        "draft": (draft, (models, state.draft_cache, narrow)),
    }
    for label, (function, _) in found.items():
        if label.startswith(("head", "round")):
            function.__name__ = label
    return found


def must_move(models: Models, state: DecodeState) -> dict[str, int]:
    """A lower bound on the bytes of main memory that a program moves on one chip.

    Each weight that it multiplies with counts once per pass, however often the pass uses it; so does the whole cache
    (all its slots are read), and the rows that it must write. The embedding does not count (a few rows of it are
    read) unless it is the lm_head too, and activations do not count, but for the base logits from which a head alone
    picks its candidates.
    """
    per_chip = device_bytes
    target = models.target_params
    tied = models.target.config.tie_word_embeddings
    vocabulary = per_chip(target["embed_tokens" if tied else "lm_head"])
    weights = per_chip(target) - (0 if tied else per_chip(target["embed_tokens"]))
    cache, context = per_chip(state.target_cache), per_chip(state.draft_cache)
    backbone, head = per_chip(models.drafter_params["backbone"]), per_chip(models.drafter_params["head"])
    fusion = fusion_bytes(models)
    slots = slots_of(state.target_cache)
    found = {"step": weights + cache + cache // slots}
    found |= {f"verify{rows}": weights + cache + rows * cache // slots for rows in (17, 64)}
    found["draft"] = backbone - fusion + vocabulary + context
    found["head"] = head
    # Draft and verify each read the lm_head: verify waits for the drafts, and no compiled program keeps it until then,
    # 97 MB to 1.2 GB a chip. At least one row of context is written.
    found["round"] = found["verify17"] + found["draft"] + fusion + context // slots + head
    config = models.drafter.config
    sequential = head - per_chip(models.drafter_params["head"]["up"])
    for count in CANDIDATES:
        rows = (config.num_drafts - config.pure_draft_prefix_len) * count * 2 * config.emb_dim
        found[f"head{count}"] = 4 * config.num_drafts * config.vocab_size + sequential + rows
        found[f"round{count}"] = found["round"] - head + sequential + rows
    return found


def fusion_bytes(models: Models) -> int:
    """Bytes on one chip of the weights that turn the target's features into the drafter's context."""
    backbone = models.drafter_params["backbone"]
    return device_bytes([backbone["fc"], backbone["hidden_norm"]])


# ----------------------------------------------------------------------------------------------------- compiling


def devices_of(chip: str, tensor: int) -> list[jax.Device]:
    return list(topologies.devices_of(SLICES[chip]))[:tensor]


def compile_program(mesh: Mesh, function, arguments) -> jax.stages.Compiled:
    """A program as it runs in decoding; these give nothing that could be stored where their argument 1 is."""
    layout = sharding.decode_layout(mesh, jax.eval_shape(function, *arguments))
    donated = () if function.__name__.startswith(("head", "tree", "prefill")) else (1,)
    return jax.jit(function, donate_argnums=donated, out_shardings=layout).lower(*arguments).compile()


def examine(program: jax.stages.Compiled, seconds: float, cache: int) -> dict:
    """The compiler's figures of one program on one chip; "traffic" is read from its text.

    cache: bytes; "beyond_cache" is the traffic without the values of at most half of it that the program makes itself.
    """
    memory, cost, text = compiled.memory(program), compiled.cost(program), program.as_text()
    return {
        "compile_seconds": seconds,
        "peak": memory["peak"],
        "arguments": memory["arguments"],
        "accessed": cost.get("bytes_accessed"),
        "seconds": cost.get("seconds"),
        "cycles": compiler_text.cycles(text),
        "traffic": hbm_traffic.traffic(text),
        "beyond_cache": hbm_traffic.traffic(text, cache=cache // 2) if cache else None,
        "collectives": collectives(text),
    }


def compile_entry(entry: tuple, folder: pathlib.Path, work: "Work") -> None:
    """Every program that the entry's JSON does not hold yet; the file is rewritten after each."""
    size, chip, tensor, *split = entry
    file = folder / f"{name(entry)}.json"
    found = json.loads(file.read_text()) if file.exists() else {"programs": {}}
    found |= {"date": str(datetime.date.today()), "jax": jax.__version__}
    mesh = sharding.make_mesh(1, 1, tensor, devices_of(chip, tensor))
    models = models_on(mesh, size, split_head=bool(split))  # outside: nothing can be run on that mesh
    with jax.set_mesh(mesh):
        found["must"] = work.must_move(models, state_on(mesh, models))
        for label, (function, arguments) in work.programs(mesh, models).items():
            if label in found["programs"]:
                continue
            begin = time.perf_counter()
            try:
                program = compile_program(mesh, function, arguments)
            except jax.errors.JaxRuntimeError as error:
                found["programs"][label] = {"error": str(error).splitlines()[0][:300]}
            else:
                found["programs"][label] = examine(program, time.perf_counter() - begin, CACHES.get(chip, 0))
                work.more(found, label, program)
            file.write_text(json.dumps(found, indent=1) + "\n")
            print(name(entry), label, f"{time.perf_counter() - begin:.0f} s", flush=True)


def thunks(label: str) -> str | None:
    """What the compiler for GPUs dumped of the program `label`: its list of thunks after its passes."""
    folder = os.environ.get("COMPILE_DECODE_DUMP")
    files = list(pathlib.Path(folder).glob(f"*jit_{label}.thunk_sequence_after_thunk_passes.txt")) if folder else []
    return files[0].read_text() if files else None


def wrapped(listed: str) -> str:
    """A program's thunks as the body of a loop, the form in which compiler_text.launches takes a round's."""
    return "\n".join(["000: kWhile [source]", *(f"  {line}" for line in listed.splitlines())])


def add_launches(found: dict, label: str, program: jax.stages.Compiled) -> None:
    """For rounds on a GPU: kernels, copies and command buffers."""
    listed = thunks(label) if label == compile_decode_tables.ROUND else None
    if listed:
        found["launches"] = compiler_text.launches(wrapped(listed), trips=BLOCK - 1)


@dataclasses.dataclass(frozen=True)
class Work:
    """What a script compiles and where it is asked for.

    module: the script's.  entries: as ENTRIES.  count: programs of one entry.
    programs: (mesh, models) → programs.  must_move: (models, state) → bytes by name.
    more: (an entry's JSON, label, program), called after each program: adds what else is to be read from it.
    dumped: names of programs whose thunks it reads, as a regular expression.
    """

    module: str
    entries: tuple[tuple, ...]
    count: int
    programs: Callable
    must_move: Callable
    more: Callable
    dumped: str


def compile_apart(entry: tuple, folder: pathlib.Path, work: Work) -> None:
    """In a separate process: a compiler that fails may end its process."""
    with tempfile.TemporaryDirectory() as dump:
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        if entry[1] == "h200":
            dumping = f"--xla_dump_to={dump} --xla_dump_hlo_module_re=jit_{work.dumped}"
            environment |= {"COMPILE_DECODE_DUMP": dump, "XLA_FLAGS": dumping}
        command = ["nice", "-n", "10", sys.executable, "-m", work.module]
        if subprocess.run(
            [*command, f"--folder={folder}", f"--entry={name(entry)}"], cwd=ROOT, env=environment
        ).returncode:
            print(name(entry), "failed", flush=True)


def whole(file: pathlib.Path, count: int = PROGRAMS) -> bool:
    return file.exists() and len(json.loads(file.read_text())["programs"]) == count


def run(work: Work, tables, description: str) -> None:
    """The script: compiles what its arguments ask for, and writes the part of the document that `tables` holds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--only", default="", help="compile entries whose name holds this")
    parser.add_argument("--entry", default="", help="compile this entry in this process and write nothing else")
    parser.add_argument(
        "--write", action="store_true", help="write the document from the stored entries, compile nothing"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    by_name = {name(entry): entry for entry in work.entries}
    if arguments.entry:
        compile_entry(by_name[arguments.entry], arguments.folder, work)
        return
    for label, entry in by_name.items():
        there = whole(arguments.folder / f"{label}.json", work.count)
        if not arguments.write and arguments.only in label and not there:
            compile_apart(entry, arguments.folder, work)
    tables.write(ROOT / "docs" / tables.PAGE, arguments.folder, list(by_name), work.count)


WORK = Work("benchmarks.compilers.decode", ENTRIES, PROGRAMS, programs, must_move, add_launches, "round")

if __name__ == "__main__":
    run(WORK, compile_decode_tables, __doc__.splitlines()[0])
