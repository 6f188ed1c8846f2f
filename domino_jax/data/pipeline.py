"""Training rows to endless batches: random access, shuffled, padded or packed, resumable from any position.

    open_files → index → TrainingRows → row order → plans → batches

The batches of a run follow from the data, the seed and the batch size alone. Every process computes the same global
batches from the lengths and encodes only its own rows of them.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from domino_jax.data import index as indexing
from domino_jax.data.index import ProcessShare
from domino_jax.data.order import Layout, Position, first_position, pack, plan_batches, row_order
from domino_jax.data.reading import BatchIterator
from domino_jax.data.rows import Index, RowEncoder, TrainingRows
from domino_jax.data.sources import DataFile, open_files
from domino_jax.runtime.errors import DataError

SAMPLED_ROWS = 4_096  # the share of padding is estimated from this many rows


def make_batches(
    pattern: str,
    encoder: RowEncoder,
    layout: Layout,
    share: ProcessShare,
    *,
    seed: int,
    held_out: int = 0,
    held_out_before: Sequence[Mapping[str, Any]] = (),
    skip_bad: bool = False,
) -> "Batches":
    """The data of a run, indexed; `Batches.start` begins to read.

    Args:
      pattern: one file, or a glob (sources.py).
      encoder: cuts rows to layout.max_length.
      held_out: prompts whose rows are left out of training (held_out.py); fewer if there is little data.
      held_out_before: prompt rows of an earlier start; where there are some, these are held out, whatever the data.
      skip_bad: rows that cannot be used are left out and counted.
    Raises DominoError: a pattern that names nothing. DataError: rows that cannot be used, with file and line.
    """
    files = open_files(pattern, share.cache)
    fingerprint = indexing.fingerprint(files, encoder)
    index = indexing.load_or_build(files, encoder, fingerprint, share, skip_bad=skip_bad)
    rows = _usable_rows(pattern, files, index, encoder, held_out, held_out_before if held_out else ())
    batches = Batches(
        rows=rows,
        fingerprint=hashlib.sha256(f"{fingerprint} {rows.num_held_out}".encode()).hexdigest(),
        layout=layout,
        seed=seed,
        process_rows=share.rows or slice(0, layout.batch_size),
    )
    bad = f", {rows.num_bad} more cannot be used" if rows.num_bad else ""
    share.report(
        f"{pattern}: {len(rows)} of {rows.num_read} rows are trained on, {rows.num_skipped} have no anchor{bad}"
    )
    if held_out:
        prompts = f"{rows.num_held_out_prompts} prompts, {rows.num_held_out} rows with these prompts"
        share.report(f"held out for evaluation: {prompts}")
    text, rows_per_place = batches.fill()
    share.report(
        f"layout {layout.kind}: {text:.1%} of a batch's tokens are text, {rows_per_place:.3g} rows in each of its"
        " places"
    )
    return batches


def _usable_rows(
    pattern: str, files: Sequence[DataFile], index: Index, encoder: RowEncoder, *held_out: Any
) -> TrainingRows:
    """The usable rows; a DataError without any."""
    rows = TrainingRows(files, index, encoder, *held_out)
    if not rows.num_read:
        raise DataError(f"{pattern}: its files hold no rows; name files with rows.")
    if not len(rows):
        raise DataError(
            f"{pattern}: none of its {rows.num_read} rows has two supervised tokens in a row within data.max_length"
            f" {encoder.max_length}.\nRaise it where answers are cut, or train on rows with answers; prompts alone are"
            " answered first with config.data.regenerate=True."
        )
    return rows


@dataclasses.dataclass(frozen=True)
class Batches:
    """The data of a run, ready to be read.

    rows: the usable rows. fingerprint: hex digits that change with the data, the tokenizer, how rows are
    cut and which are held out.
    """

    rows: TrainingRows
    fingerprint: str
    layout: Layout
    seed: int
    process_rows: slice

    def start(self, state: dict | None = None) -> "BatchIterator":
        """Batches from the beginning, or from a position that `BatchIterator.state` returned.

        A batch: tokens int32 [b, S], loss_mask float32 [b, S], row_ids int32 [b] (the first row of a pack); with layout
        pack also positions int32 [b, S], from 0 in each document, and documents int32 [b, S], 1, 2, … and 0 for
        padding. b: the rows of this process.
        """
        order, count = row_order(self.rows.usable, self.seed), len(self.rows)
        position = Position(**state) if state else first_position(self.layout, count)
        plans = plan_batches(order, self.rows.lengths, self.layout, count, position)
        return BatchIterator(plans, position, self.rows, self.layout, self.process_rows)

    def fill(self) -> tuple[float, float]:
        """(share of a batch's tokens that are text, rows in each place), by SAMPLED_ROWS rows drawn evenly from all."""
        lengths = self.rows.lengths[self.rows.usable[:: -(-len(self.rows) // SAMPLED_ROWS)]]
        length = self.layout.max_length
        places = len(pack(lengths, length)[1]) if self.layout.kind == "pack" else len(lengths)
        return float(lengths.sum()) / (places * length), len(lengths) / places
