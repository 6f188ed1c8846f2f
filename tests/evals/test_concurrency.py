"""concurrency.py over a stub generator: each size is measured once, against plain decoding of the same size."""

from domino_jax.decoding.generate import Clock, Generated, Generation
from domino_jax.evals.concurrency import measure_concurrency
from domino_jax.evals.lanes import Lane
from domino_jax.evals.run import Speech
from domino_jax.evals.run_files import RunFiles

ROWS = [{"id": str(index), "token_ids": [1, 2], "task": "gsm8k"} for index in range(10)]
FACTS = {"round_widths": {"domino": 4}, "simulated": None, "prompts": {"checked": 0}}


class Timed:
    """A group takes a second plain and half of one otherwise, and another second of prefill."""

    def __init__(self):
        self.groups = []

    def generate(self, models, prompts, mode, requests):
        self.groups.append((mode, len(prompts)))
        plain = mode == "autoregressive"
        answers = [Generation([5, 6, 7], [] if plain else [2], "length")] * len(prompts)
        return Generated(answers, Clock(1.0, 1.0 if plain else 0.5, 0.0, 2 * len(prompts)))


def measure(folder, sizes):
    made = {}

    def lanes_of(size):
        made[size] = Timed()
        return [Lane(mode, mode, None, made[size]) for mode in ("autoregressive", "domino")]

    with RunFiles(folder, {}) as files:
        return measure_concurrency(lanes_of, sizes, ROWS, Speech(None, False), files, FACTS), made


def test_every_mode_has_figures_at_every_size(tmp_path):
    found, made = measure(tmp_path, (1, 2))
    assert [count for mode, count in made[2].groups if mode == "domino"] == [8, 2]
    assert list(found) == ["1", "2"]
    domino = found["2"]["modes"]["domino"]
    assert (domino["tokens_per_second"], domino["speedup"], domino["tau_pooled"]) == (20.0, 2.0, 2.0)
    assert domino["output_tokens_per_second"] == 30 / 3.0  # all tokens, the prefills' time too
    identical = found["1"]["identical_outputs"]["domino"]
    assert (identical["same"], identical["of"]) == (10, 10)


def test_a_size_that_is_on_disk_is_not_measured_again(tmp_path):
    first, _ = measure(tmp_path, (1,))
    found, made = measure(tmp_path, (1, 4))
    assert found["1"] == first["1"] and list(made) == [4]
