"""Cycles and launches of a program, from the texts that the compilers for TPUs and GPUs leave."""

import re


def cycles(text: str) -> int | None:
    """Cycles that the compiler for TPUs expects of the operations of a compiled program, loop bodies once; else None.

    It leaves out what operations wait for memory that is fetched ahead of them.
    """
    entry = text[text.find("\nENTRY ") :]
    counts = [int(count) for count in re.findall(r'"estimated_cycles":"(\d+)"', entry)]
    return sum(counts) or None


def launches(text: str, trips: int) -> dict[str, int]:
    """What a GPU starts in one turn of a program's outer loop, from the compiler's list of thunks after its passes.

    kernels, copies: how many; in_buffers: how many of both are in command buffers.  starts: launches that the host
    makes, a command buffer being one.  An operation in an inner loop counts `trips` times.

        >>> 002: kWhile … condition: … body: 000: kCommandBuffer … 004: kCustomKernel … 005: kCopy
        {"kernels": 1, "copies": 1, "in_buffers": 2, "starts": 1}
    """
    found = dict.fromkeys(("kernels", "copies", "in_buffers", "starts"), 0)
    around: list[tuple[int, str]] = []  # indentation and kind of what encloses the line
    for line in text.splitlines():
        match = re.match(r"( *)\d+: k(\w+)", line)
        if not match:
            continue
        indent, kind = len(match[1]), match[2]
        while around and around[-1][0] >= indent:
            around.pop()
        kinds = [outer for _, outer in around]
        times = trips ** max(0, kinds.count("While") - 1)
        if "While" in kinds:
            inside = "CommandBuffer" in kinds
            part = None if kind in _HOLDERS else "copies" if kind == "Copy" else "kernels"
            if part:
                found[part] += times
                found["in_buffers"] += times * inside
            if not inside and (part or kind == "CommandBuffer"):
                found["starts"] += times
        if kind in _HOLDERS:
            around.append((indent, kind))
    return found


# Thunks that only hold others.
_HOLDERS = ("While", "CommandBuffer", "DynamicSliceFusion", "DynamicSlice", "Sequential", "Conditional")
