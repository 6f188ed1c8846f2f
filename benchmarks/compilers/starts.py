"""What a first start compiles: the programs of `serve` before it is ready, and of `decode` for one prompt.

    python -m benchmarks.compilers.starts --chip=h100 --tensor=1 --effort=-1
    python -m benchmarks.compilers.starts --chip=v5p --tensor=4 --effort=-1

Prints one line for each program: CPU seconds of tracing and lowering, and of compiling. Needs requirements-compile.txt.
"""

import argparse
import resource
from collections.abc import Iterator

import jax

from benchmarks.compilers import programs
from benchmarks.compilers.decode import SLICES, devices_of
from domino_jax import serve
from domino_jax.decoding.background import Rehearsal
from domino_jax.decoding.generate import Generator, new_generator
from domino_jax.decoding.programs import Program
from domino_jax.decoding.queue import Queue
from domino_jax.decoding.requests import QueuedRequest
from domino_jax.decoding.settings import default_modes
from domino_jax.method.pair import Pair
from domino_jax.models import sharding
from domino_jax.recipe import cli
from domino_jax.serving.readiness import usual_programs, usual_request


def of_serve(generator: Generator, models: Pair) -> list[Program]:
    return usual_programs(generator, models, "draft")


def of_decode(generator: Generator, models: Pair) -> list[Program]:
    """One prompt of 100 tokens in each of the recipe's modes."""
    missing: dict[tuple, tuple] = {}
    for mode in default_modes(generator.drafter):
        request = QueuedRequest([0] * 100, usual_request(generator))
        queue = Queue(Rehearsal.of(generator, missing), models, mode, [request])
        queue.admit()
        queue.advance(1)
    return [program for program, _ in missing.values()]


def on_mesh(program: Program, models: Pair) -> Program:
    """A program of shapes, laid out as decoding lays them out."""
    mesh = jax.sharding.get_mesh()

    def place(argument):
        if isinstance(argument, Pair):
            return models if argument.drafter else Pair(models.target, models.target_params)
        return programs.placed(argument, sharding.decode_layout(mesh, argument))

    return program._replace(arguments=tuple(map(place, program.arguments)))


def seconds() -> float:
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


def measure(chip: str, tensor: int, size: str, effort: float, commands: dict) -> Iterator[str]:
    mesh = sharding.make_mesh(1, 1, tensor, devices_of(chip, tensor))
    models = programs.models_on(mesh, size)
    argv = ["serve", f"--config=configs/qwen3_{size}.py"]
    settings = serve.settings_of(cli.parse(argv, ("config",), ("host", "port")))
    for command, programs_of in commands.items():
        change = {} if command == "serve" else {"batch_size": 1}
        generator = new_generator(models, settings.change(**change))
        for program in programs_of(generator, models):
            begin = seconds()
            with jax.set_mesh(mesh):
                program = on_mesh(program, models)
                lowered = generator.jitted(program).lower(*program.arguments)
                middle = seconds()
                lowered.compile({"exec_time_optimization_effort": effort} if effort else None)
            name = " ".join(map(str, (part for part in program.key if isinstance(part, str | int))))
            yield f"{command} | {name} | {middle - begin:.1f} | {seconds() - middle:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--chip", default="h100", choices=SLICES)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--size", default="8b")
    parser.add_argument("--effort", type=float, default=0.0)
    parser.add_argument("--commands", default="serve,decode")
    flags = parser.parse_args()
    every = {"serve": of_serve, "decode": of_decode}
    chosen = {name: every[name] for name in flags.commands.split(",")}
    for line in measure(flags.chip, flags.tensor, flags.size, flags.effort, chosen):
        print(line, flush=True)


if __name__ == "__main__":
    main()
