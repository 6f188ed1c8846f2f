"""The drafters that config.drafter.head chooses among. No imports, so that a recipe is checked before jax starts."""

# A backbone that drafts a block, and what corrects its logits: nothing (plain DFlash), or the Domino head.
BLOCK_HEADS = (NONE, DOMINO) = ("none", "domino")
HEADS = BLOCK_HEADS
