"""The drafters that config.drafter.head chooses among. No imports, so that a recipe is checked before jax starts."""

# A backbone that drafts a block, and what corrects its logits: nothing (plain DFlash), the Domino head, or one of
# DSpark's Markov heads.
BLOCK_HEADS = (NONE, DOMINO, MARKOV) = ("none", "domino", "markov")
HEADS = BLOCK_HEADS
MARKOV_KINDS = (VANILLA, GATED, RNN) = ("vanilla", "gated", "rnn")
