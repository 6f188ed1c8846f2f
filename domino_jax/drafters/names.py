"""The drafters that config.drafter.head chooses among. No imports, so that a recipe is checked before jax starts."""

# A backbone that drafts a block, and what corrects its logits: nothing (plain DFlash), the Domino head, one of DSpark's
# Markov heads, or DFlash2's selector among few candidates.
BLOCK_HEADS = (NONE, DOMINO, MARKOV, DFLASH2) = ("none", "domino", "markov", "dflash2")
HEADS = BLOCK_HEADS
MARKOV_KINDS = (VANILLA, GATED, RNN) = ("vanilla", "gated", "rnn")
# What the loss of the selector does with a slot whose label is no candidate.
SELECTOR_RULES = (DROP, REPLACE) = ("drop", "replace")
