"""generate.py: any prompts in fixed shapes; what fits, what is refused, and what is compiled."""

import functools
import pathlib
import subprocess
import sys

import jax
import pytest

from domino_jax.decoding.requests import Request
from domino_jax.method.pair import Pair
from domino_jax.method.settings import SamplingParams
from domino_jax.runtime.errors import DataError, DominoError
from tests.helpers.decoding_models import SmallGenerator, make_generator, random_models, random_prompts, random_target
from tests.helpers.paths import ROOT

GREEDY, WARM = SamplingParams(), SamplingParams(1.0)


@functools.lru_cache
def generator(batch: int, sampling: SamplingParams) -> SmallGenerator:
    return make_generator(random_models(), batch_size=batch, sampling=sampling)


@pytest.mark.parametrize(("shift_label", "block_rows"), [(True, 5), (False, 4)])
def test_a_prompt_one_token_over_the_caches_edge_is_refused(shift_label, block_rows):
    made = make_generator(random_models(shift_label=shift_label), cache_length=40)
    fitting = [1] * (24 - block_rows)
    made.check_prompt(fitting, "prompt 0")
    with pytest.raises(DataError, match=f"prompt 1 needs 41 .*{block_rows} block.* 40"):
        made.generate([fitting, [*fitting, 1]], "domino")
    assert not made.compiled  # nothing has run


def test_a_prompt_that_cannot_be_is_refused():
    for prompt, message in (([], "is empty"), ([3, 64], "token id 64, but the target has 64"), ([-2], "token id -2")):
        with pytest.raises(DataError, match=f"prompt 0 .*{message}"):
            generator(1, GREEDY).generate([prompt], "domino")
    with pytest.raises(DataError, match="17 .* 16"):
        generator(1, GREEDY).generate([[7]], "draft", [Request(0, max_new_tokens=17)])


@pytest.mark.parametrize(
    ("head", "mode", "message"),
    [
        (None, "backbone", "config.drafter.path"),
        ("none", "domino", "mode 'draft'"),
        ("domino", "forest", "'forest'"),
        ("domino", "tree", "TreeSettings"),
        ("eagle3", "backbone", "eagle3 .*'draft'"),
    ],
)
def test_a_mode_that_the_models_do_not_have_is_refused(head, mode, message):
    models = random_models(head=head) if head else Pair(*random_target())
    with pytest.raises(DominoError, match=message):
        make_generator(models).generate([[1]], mode)


def test_more_drafts_than_the_drafter_makes_are_refused():
    for head, drafts, most in (("domino", 5, 4), ("eagle3", 65, 64)):
        with pytest.raises(DominoError, match=f"num_drafts is {drafts}.*{most}"):
            make_generator(random_models(head=head), num_drafts=drafts)


class Compilations:
    """Counts the programs that XLA is asked to build while it is open."""

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self.listen)
        return self

    def listen(self, event: str, seconds: float, **_):
        self.count += event.endswith("backend_compile_duration")

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self.listen)


@pytest.mark.long
def test_one_program_per_bucket_and_none_after_warm_up():
    """20 requests of 1 to 39 tokens: three buckets for a whole batch and for a row, one program of rounds."""
    made = make_generator(random_models(), batch_size=2, sampling=WARM)
    prompts = random_prompts(20, 1, 39)
    for length in (1, 17, 33):
        made.generate([[1] * length] * 3, "domino")
    with Compilations() as seen:
        clocks = [made.generator.generate(made.models, prompts, mode).clock for mode in ("domino", "draft")]
        made.generate(prompts[:3], "domino", [100, 7, 5])
    assert (seen.count, len(made.compiled)) == (0, 2 * 3 + 1 + 1)  # prefills, an admission, rounds
    assert [clock.compile_seconds for clock in clocks] == [0.0, 0.0]


@pytest.mark.long
def test_programs_are_dropped_before_a_process_has_no_memory_mappings_left():
    limit = pathlib.Path("/proc/sys/vm/max_map_count")
    if not limit.exists() or int(limit.read_text()) > 300_000:
        pytest.skip("Linux allows a process more mappings than a test should fill, or none are counted")
    command = [sys.executable, "-m", "tests.helpers.full_process"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert int(ended.stdout.splitlines()[-1]) < 5
