"""The Domino drafter: a parallel backbone and a small causal head."""
