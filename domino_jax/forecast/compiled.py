"""The cost of a program by its compiler: memory, FLOPs, bytes."""

import jax


def memory(program: jax.stages.Compiled) -> dict[str, int]:
    """Bytes on one device: "arguments", "temporary", "output" (what is not an argument's memory again), "peak"."""
    analysis = program.memory_analysis()
    output = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    whole = analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + output
    return {
        "arguments": analysis.argument_size_in_bytes,
        "temporary": analysis.temp_size_in_bytes,
        "output": output,
        # Compilers that plan the whole life of each buffer say the peak; else all of it together bounds it.
        "peak": analysis.peak_memory_in_bytes or whole,
    }


def cost(program: jax.stages.Compiled) -> dict[str, float]:
    """The compiler's own figures of one device: "flops", "bytes_accessed", "seconds", those it gives.

    It counts a loop's body once, whatever its turns, and its seconds are an estimate; a negative one (the sentinel of
    some operation that it cannot judge) is left out.
    """
    figures = program.cost_analysis() or {}
    names = {"flops": "flops", "bytes accessed": "bytes_accessed", "optimal_seconds": "seconds"}
    return {ours: float(figures[name]) for name, ours in names.items() if name in figures and figures[name] > 0}
