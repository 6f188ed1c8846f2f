"""The rows of the text and of their block that the layers of a backbone read.

A first reader can skip this file: without sliding windows every layer reads all of the text and its whole block.
"""

from domino_jax.method.config_keys import refuse


class LayerWindows:
    """The part of DrafterConfig about layer_types, sliding_window, is_causal and draft_window."""

    def is_sliding(self, layer: int) -> bool:
        """True when this draft layer uses the sliding window."""
        return bool(self.layer_types) and self.layer_types[layer] == "sliding_attention"

    def window(self, layer: int) -> int | None:
        """The sliding window of this draft layer, None where it reads all of the context."""
        return self.sliding_window if self.is_sliding(layer) else None

    def causal(self, layer: int) -> bool:
        """True when a slot of this draft layer reads only the slots of its block that are not after its own."""
        return self.is_sliding(layer) if self.is_causal is None else self.is_causal

    def reach(self, layer: int) -> int | None:
        """The rows at the end of the text that a layer reads when decoding; None where it reads all of it."""
        return min((rows for rows in (self.window(layer), self.draft_window) if rows), default=None)

    def check_windows(self) -> None:
        """Raises DataError for layer_types and a window that contradict each other."""
        types, layers = set(self.layer_types), self.num_hidden_layers
        refuse(
            len(self.layer_types) not in (0, layers),
            "layer_types",
            f"layer_types has {len(self.layer_types)} entries for num_hidden_layers {layers}",
        )
        refuse(
            not types <= {"full_attention", "sliding_attention"},
            "layer_types",
            f"layer_types {sorted(types)} may hold full_attention and sliding_attention only",
        )
        refuse(
            "sliding_attention" in types and (self.sliding_window or 0) < 1,
            "sliding_window",
            "layer_types holds sliding_attention, but sliding_window and use_sliding_window leave it without a window",
        )
