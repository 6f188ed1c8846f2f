"""What a compiled program moves and launches, read from the texts that compilers leave.

`traffic` counts bytes to and from a device's main memory. A compiler's own "bytes accessed" counts data that is
prefetched into a TPU's vector memory again at each use, counts a whole table when a gather reads one row of it, and
counts a loop's body once. Here a byte counts when main memory is read or written, and a loop's body as often as it
runs. Bytes that a cache (a GPU's L2) would keep count too, unless the size of the cache is given.
"""

import dataclasses
import math
import re

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<op>[\w\-]+)\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_BITS = re.compile(r"(?:[suc]|b?f)(\d+)(?:e\d+m\d+\w*)?")  # s4, u8, bf16, f8e4m3fn, c64, …
_LIMIT = re.compile(r"s32\[\]\S* constant\((\d+)\)")

# Names for what is there already, and the ends of what was counted at its start.
_FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id", "replica-id"}
_FREE |= {"optimization-barrier", "copy-done", "slice-done", "async-done", "async-update", "all-reduce-done", "iota"}
_FREE |= {"all-gather-done", "collective-permute-done"}
_SLICES = {"dynamic-slice", "slice", "gather"}
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # operand that holds what is written
# Thunks that only hold others.
_HOLDERS = ("While", "CommandBuffer", "DynamicSliceFusion", "DynamicSlice", "Sequential", "Conditional")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; shape as it is printed, operands by name."""

    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool


def traffic(text: str, cache: int = 0) -> int:
    """Bytes of main memory read and written by one run of the program.

    Args:
        cache: bytes; a value that the program makes for itself and that is no larger is taken to stay in a cache. Its
            arguments, its results and what is written into them in place count as before.
    """
    program = _parse(text)
    if cache:
        program = {name: _kept(lines, program, cache) for name, lines in program.items()}
    return _Counter(program).of(next(name for name in program if name.startswith("ENTRY ")))


def _parse(text: str) -> dict[str, list[Instruction]]:
    program: dict[str, list[Instruction]] = {}
    lines: list[Instruction] = []
    for line in text.splitlines():
        opened = COMPUTATION.match(line)
        if opened:
            lines = program.setdefault(("ENTRY " if opened[1] else "") + opened[2], [])
        match = _INSTRUCTION.match(line)
        if match:
            operands = tuple(re.findall(r"%([\w.\-]+)", match["rest"].split(")")[0]))
            root = bool(match["root"])
            lines.append(Instruction(match["name"], match["shape"], match["op"], operands, match["rest"], root))
    return program


def _kept(lines: list[Instruction], program: dict[str, list[Instruction]], cache: int) -> list[Instruction]:
    """The computation's lines, the small values that it makes marked as lying outside main memory."""
    root = next((line for line in lines if line.is_root), None)
    results = {root.name, *(root.operands if root.op == "tuple" else ())} if root else set()
    there: set[str] = set()  # arguments and what is written into them, under every name they go by

    def mark(array: re.Match) -> str:
        kind, dims, layout = array.groups()
        small = array_bytes(kind, dims) <= cache and "S(" not in (layout or "")
        return f"{kind}[{dims}]{{S(1)}}" if small else array[0]

    marked = []
    for line in lines:
        renamed = line.op in ("get-tuple-element", "bitcast") and line.operands[0] in there
        if renamed or line.op in ("parameter", "while", "tuple") or _in_place(line, program):
            there.add(line.name)
        elif line.name not in results:
            line = dataclasses.replace(line, shape=_ARRAY.sub(mark, line.shape))
        marked.append(line)
    return marked


def _in_place(line: Instruction, program: dict[str, list[Instruction]]) -> bool:
    """Whether a line's result is an update of one of its operands, such as a cache with new rows."""
    if line.op != "fusion":
        return line.op in _UPDATES
    return any(inner.op in _UPDATES for inner in program[_CALLED.search(line.rest)[1]])


def array_bytes(kind: str, dims: str) -> int:
    """Bytes of a printed array type, as bf16 [8,128]; 0 for a kind that holds no numbers, such as token.

    Numbers of less than a byte are packed, as compilers store them in main memory.
    """
    bits = 8 if kind == "pred" else int(match[1]) if (match := _BITS.fullmatch(kind)) else 0
    return -(-bits * math.prod(int(size) for size in dims.split(",") if size) // 8)


def arrays_written(text: str) -> set[tuple[int, ...]]:
    """The dimensions of the arrays that a program writes to main memory whole, updates in place left out."""
    program = _parse(text)
    written: set[str] = set()

    def visit(computation: str) -> None:
        for line in program[computation]:
            if line.op in ("while", "call", "async-start"):
                visit(_CALLED.search(line.rest)[1])
            elif line.op not in _FREE and not line.op.endswith(("-start", "-done")) and not _in_place(line, program):
                written.update(dims for _, dims, layout in _ARRAY.findall(line.shape) if "S(" not in (layout or ""))

    visit(next(name for name in program if name.startswith("ENTRY ")))
    return {tuple(map(int, dims.split(","))) for dims in written if dims}


def _main_memory(shape: str) -> int:
    """Bytes of a printed shape that are in main memory: "S(1)" in a layout is a TPU's vector memory."""
    return sum(array_bytes(kind, dims) for kind, dims, layout in _ARRAY.findall(shape) if "S(" not in (layout or ""))


def _all_bytes(shape: str) -> int:
    return sum(array_bytes(kind, dims) for kind, dims, _ in _ARRAY.findall(shape))


class _Counter:
    def __init__(self, program: dict[str, list[Instruction]]):
        self.program = program

    def of(self, computation: str) -> int:
        by_name = {line.name: line for line in self.program[computation]}
        return sum(self._line(line, by_name) for line in self.program[computation])

    def _line(self, line: Instruction, by_name: dict[str, Instruction]) -> int:
        if line.op in _FREE or line.op.endswith("-done"):
            return 0
        shapes = [by_name[name].shape for name in line.operands if name in by_name]
        if line.op == "while":
            return self._trips(line) * self.of(_CALLED.search(line.rest)[1])
        if line.op in ("call", "async-start"):
            return self.of(_CALLED.search(line.rest)[1])
        if line.op == "conditional":
            branches = re.findall(r"%([\w.\-]+)", line.rest.split("branch_computations={")[-1].split("}")[0])
            return max((self.of(name) for name in branches if name in self.program), default=0)
        if line.op == "copy-start":
            arrays = _ARRAY.findall(line.shape)
            written = _main_memory("{}[{}]{}".format(*arrays[0]))
            return _main_memory(shapes[0]) + written
        if line.op == "slice-start":  # printed as ((the whole operand), the part, ...): the part alone is moved
            kind, dims, layout = _ARRAY.findall(line.shape)[1]
            part = f"{kind}[{dims}]{layout}"
            return _all_bytes(part) * bool(_main_memory(shapes[0])) + _main_memory(part)
        if line.op in _SLICES:
            size = _all_bytes(line.shape)
            return size * bool(_main_memory(shapes[0])) + _main_memory(line.shape)
        if line.op in _UPDATES:
            update = shapes[_UPDATES[line.op]]
            return _main_memory(update) + _all_bytes(update) * bool(_main_memory(line.shape))
        if line.op == "fusion":
            return self._fusion(line, shapes)
        return sum(map(_main_memory, shapes)) + _main_memory(line.shape)

    def _trips(self, line: Instruction) -> int:
        known = _TRIPS.search(line.rest)
        if known:
            return int(known[1])
        # The compiler for TPUs leaves the count to the condition: the constant that the counter is compared with.
        condition = self.program[_CONDITION.search(line.rest)[1]]
        printed = [f"{one.shape} {one.op}({one.rest}" for one in condition]
        limits = [int(match[1]) for match in map(_LIMIT.match, printed) if match]
        return max(limits, default=1) or 1

    def _fusion(self, line: Instruction, shapes: list[str]) -> int:
        called = self.program[_CALLED.search(line.rest)[1]]
        parameters = {int(one.rest.split(")")[0]): one.name for one in called if one.op == "parameter"}
        total = 0
        for index, shape in enumerate(shapes):
            size = _main_memory(shape)
            if size:
                part = self._read(called, parameters[index]) if index in parameters else None
                total += size if part is None else min(size, part)
        return total + self._written(called, line.shape)

    def _read(self, lines: list[Instruction], name: str) -> int | None:
        """Bytes that a fused computation reads of a parameter; None is all of it."""
        total = 0
        for line in lines:
            if name not in line.operands:
                continue
            if line.op in _SLICES and line.operands[0] == name:
                part = _all_bytes(line.shape)
            elif line.op in _UPDATES and line.operands[0] == name:
                part = 0
            elif line.op in ("bitcast", "reshape") and not line.is_root:
                part = self._read(lines, line.name)
            elif line.op == "fusion":
                called = self.program[_CALLED.search(line.rest)[1]]
                inner = {int(one.rest.split(")")[0]): one.name for one in called if one.op == "parameter"}
                parts = [self._read(called, inner[i]) for i, one in enumerate(line.operands) if one == name]
                part = None if None in parts else sum(parts)
            else:
                part = None
            if part is None:
                return None
            total += part
        return total

    def _written(self, lines: list[Instruction], shape: str) -> int:
        """Bytes that a fusion of this printed shape writes to main memory: of an update in place the update alone."""
        by_name = {line.name: line for line in lines}
        root = next((line for line in lines if line.is_root), None)
        outputs = ["{}[{}]{}".format(*array) for array in _ARRAY.findall(shape)]
        roots = [by_name[name] for name in root.operands] if root and root.op == "tuple" else [root]
        if root is None or len(roots) != len(outputs):
            return _main_memory(shape)
        return sum(self._root_bytes(one, by_name, output) for one, output in zip(roots, outputs, strict=True))

    def _root_bytes(self, root: Instruction, by_name: dict[str, Instruction], shape: str) -> int:
        if not _main_memory(shape):
            return 0
        while root.op in ("bitcast", "reshape") and root.operands[0] in by_name:
            root = by_name[root.operands[0]]
        if root.op in _UPDATES:
            return _all_bytes(by_name[root.operands[_UPDATES[root.op]]].shape)
        if root.op == "fusion":
            return min(_main_memory(shape), self._written(self.program[_CALLED.search(root.rest)[1]], root.shape))
        return _main_memory(shape)


def launches(text: str, trips: int) -> dict[str, int]:
    """What a GPU starts in one turn of a program's outer loop, from the compiler's list of thunks after its passes.

    kernels, copies: how many; in_buffers: how many of both are in command buffers.  starts: launches that the host
    makes, a command buffer being one.  An operation in an inner loop counts `trips` times.

        >>> 002: kWhile … condition: … body: 000: kCommandBuffer … 004: kCustomKernel … 005: kCopy
        {"kernels": 1, "copies": 1, "in_buffers": 2, "starts": 1}
    """
    counts = dict.fromkeys(("kernels", "copies", "in_buffers", "starts"), 0)
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
                counts[part] += times
                counts["in_buffers"] += times * inside
            if not inside and (part or kind == "CommandBuffer"):
                counts["starts"] += times
        if kind in _HOLDERS:
            around.append((indent, kind))
    return counts
