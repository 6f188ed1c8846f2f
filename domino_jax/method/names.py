"""The drafters that config.drafter.head chooses among. No imports, so that a recipe is checked before jax starts."""

# A backbone that drafts a block, and what corrects its logits: nothing (plain DFlash), the Domino head, one of DSpark's
# Markov heads, or DFlash2's selector among few candidates.
BLOCK_HEADS = (NONE, DOMINO, MARKOV, DFLASH2) = ("none", "domino", "markov", "dflash2")
# Drafters of another structure, which learn from every row of the text instead of from blocks.
ROW_DRAFTERS = (EAGLE3, MEDUSA) = ("eagle3", "medusa")
HEADS = (*BLOCK_HEADS, *ROW_DRAFTERS)
# Where each head's rank is: in a recipe's drafter section and in a drafter's config.
RANK_KEYS = {DOMINO: "emb_dim", MARKOV: "markov_rank", DFLASH2: "selector_rank"}
MARKOV_KINDS = (VANILLA, GATED, RNN) = ("vanilla", "gated", "rnn")
# The default and the largest length of an EAGLE-3 chain; the default is the public number of training passes.
CHAIN, LONGEST_CHAIN = 7, 64
FUSED_LAYERS = 3  # layers of the target whose outputs EAGLE-3 reads
# Far above any public drafter: more slots, a larger rank or more Medusa heads are refused before anything is allocated.
LARGEST_BLOCK, LARGEST_RANK, LARGEST_HEADS = 4_096, 65_536, 1_024
