"""regenerate.py: the target's own tokens, masked; killed at any byte and continued, the file comes out the same."""

import concurrent.futures
import dataclasses
import json
import threading

import pytest

from domino_jax import regenerate
from domino_jax.data.answer_files import ALONE, AnswerFiles, ProcessGroup
from domino_jax.data.chat import TextCodec
from domino_jax.data.prompts import read_jsonl
from domino_jax.decoding import conversations
from domino_jax.decoding.conversations import first_turn
from domino_jax.decoding.settings import DecodeSettings
from domino_jax.method.settings import SamplingParams
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.weights.loading import load_target
from tests.helpers.chat import encode_training_row
from tests.helpers.commands import run
from tests.helpers.data_files import BytesTokenizer
from tests.helpers.paths import ROOT
from tests.helpers.train_runs import CASES, GOLDEN, write_rows

SETTINGS = DecodeSettings(batch_size=2, max_new_tokens=12)
PROMPTS = [{"id": f"p{index}", "token_ids": case["prompt"]} for index, case in enumerate(CASES)]
PROMPTS.append({"id": "p4", "token_ids": CASES[2]["prompt"][:9]})


@pytest.fixture(scope="module")
def target():
    return load_target(str(GOLDEN / "target"), "float32")


@pytest.fixture(scope="module")
def generators():
    """Compiled generators, kept between the runs of this module."""
    return {}


@pytest.fixture
def shared(monkeypatch, generators):
    """Lets every run use the generators of the runs before it that had the same settings."""
    make = conversations.Answerer.__init__

    def init(self, models, settings, stop_ids=()):
        make(self, models, settings, stop_ids)
        drafter = models.drafter.config if models.drafter is not None else None
        self.generators = generators.setdefault((id(models.target_params), drafter, settings, tuple(stop_ids)), {})

    monkeypatch.setattr(conversations.Answerer, "__init__", init)


@pytest.fixture
def rows_file(target, shared, tmp_path):
    """A finished file of five rows."""
    path = tmp_path / "rows.jsonl"
    answer_all(target, PROMPTS, path, SETTINGS)
    return path


@pytest.fixture
def answered(monkeypatch, rows_file):
    """The ids of every batch that is answered after rows_file."""
    batches, answer = [], conversations.Answerer.answer

    def record(self, prompts, *more):
        batches.append([prompt.id for prompt in prompts])
        return answer(self, prompts, *more)

    monkeypatch.setattr(conversations.Answerer, "answer", record)
    return batches


def command(tmp_path, token_ids, *more: str) -> list[str]:
    """Flags of the command over one prompt."""
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"token_ids": token_ids}])
    words = {"config": ROOT / "configs" / "tiny.py", "config.target.path": GOLDEN / "target", "prompts": prompts}
    words |= {"output": tmp_path / "new" / "rows.jsonl", "config.regenerate.max_new_tokens": 5, "distributed": "off"}
    return [*(f"--{name}={value}" for name, value in words.items()), *more]


def answer_all(target, prompts, path, settings, drafter_path=None, processes=ALONE, weights="w"):
    origin = regenerate.origin_of(prompts, {"weights": weights}, None, settings)
    files = AnswerFiles(path, [row["id"] for row in prompts], origin, processes)
    regenerate.regenerate_rows(target, prompts, files, settings, drafter_path)


def rows_of(path):
    return {row["id"]: row for _, row in read_jsonl(path)}


def test_rows_hold_the_prompt_and_the_targets_answer_and_a_whole_file_is_left_alone(target, rows_file):
    rows = rows_of(rows_file)
    assert list(rows) == ["p0", "p1", "p2", "p3", "p4"]  # the order of the prompts
    for index, case in enumerate(CASES):
        row = rows[f"p{index}"]
        assert row["token_ids"] == case["prompt"] + case["output"][:12]
        assert row["loss_mask"] == [0] * len(case["prompt"]) + [1] * 12
        assert row["finish_reason"] == "length"
        trained_on = encode_training_row(None, {key: row[key] for key in row}, thinking=False)
        assert trained_on.token_ids.tolist() == row["token_ids"]
    before = rows_file.read_bytes()
    answer_all(target, PROMPTS, rows_file, SETTINGS)
    assert rows_file.read_bytes() == before


def test_a_row_is_answered_with_the_sampling_values_that_it_carries(target, shared, tmp_path):
    ids = CASES[0]["prompt"]
    rows = [{"id": "short", "token_ids": ids, "max_new_tokens": 3}, {"id": "plain", "token_ids": ids}]
    rows += [{"id": name, "token_ids": ids, "temperature": 5.0, "seed": 7} for name in ("warm", "again")]
    answer_all(target, rows, tmp_path / "rows.jsonl", SETTINGS)
    answers = {name: row["token_ids"][len(ids) :] for name, row in rows_of(tmp_path / "rows.jsonl").items()}
    greedy = CASES[0]["output"]
    assert (answers["short"], answers["plain"]) == (greedy[:3], greedy[:12])
    assert answers["warm"] == answers["again"] != answers["plain"]  # the seed keys the noise, not the place


def test_killed_at_any_byte_and_continued_the_file_is_the_same(target, rows_file):
    whole = rows_file.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (0, 1, ends[0] - 1, ends[0], ends[0] + 1, ends[1] + 7, ends[3] - 2, ends[4] - 1):
        rows_file.write_bytes(whole[:cut])
        answer_all(target, PROMPTS, rows_file, SETTINGS)
        assert rows_file.read_bytes() == whole, cut


def test_a_file_made_with_something_else_is_refused(target, rows_file):
    for changes, expected in (
        ({"sampling": SamplingParams(0.5)}, "temperature: 0.0 before, 0.5 now"),
        ({"dtype": "float32"}, "target.dtype: 'bfloat16' before, 'float32' now"),
    ):
        with pytest.raises(DominoError, match=expected) as refused:
            answer_all(target, PROMPTS, rows_file, dataclasses.replace(SETTINGS, **changes))
        assert refused.value.exit_code == 2 and len(str(refused.value).splitlines()) <= 5
    with pytest.raises(DominoError, match="prompts_sha256"):
        answer_all(target, PROMPTS[:4], rows_file, SETTINGS)
    with pytest.raises(DominoError, match="target.weights: 'w' before, 'v' now"):
        answer_all(target, PROMPTS, rows_file, SETTINGS, weights="v")


def test_a_file_of_unknown_making_and_doubled_rows_are_refused(target, rows_file):
    first = rows_file.read_bytes().split(b"\n")[0]
    rows_file.write_bytes(first + b"\n" + first + b"\n")
    with pytest.raises(DataError, match=r"rows.jsonl:2: the id 'p\d' is missing or there twice"):
        answer_all(target, PROMPTS, rows_file, SETTINGS)
    rows_file.with_name("rows.jsonl.meta.json").unlink()
    with pytest.raises(DominoError, match="it is not known what the rows were made with"):
        answer_all(target, PROMPTS, rows_file, SETTINGS)


def test_every_turn_is_answered_with_the_generated_history(target, shared, tmp_path):
    chat = dataclasses.replace(target, tokenizer=BytesTokenizer())
    messages = [{"role": "user", "content": "def f(x):"}, {"role": "assistant", "content": "OLD"}]
    messages += [{"role": "user", "content": "return x"}]
    path = tmp_path / "rows.jsonl"
    prompts = [{"id": "two", "messages": messages}, {"id": "one", "messages": messages[:1]}]
    answer_all(chat, prompts, path, SETTINGS)
    two, one = (rows_of(path)[name] for name in ("two", "one"))
    assert [message["role"] for message in two["messages"]] == ["user", "assistant", "user", "assistant"]
    assert two["messages"][1] == one["messages"][1]
    assert two["messages"][1]["content"] != "OLD"
    before = "U(def f(x):|)A("
    assert one["loss_mask"] == [0] * len(before) + [1] * 12
    history = f"{before}{two['messages'][1]['content']}|)U(return x|)A("
    assert two["token_ids"][: len(history)] == list(history.encode())
    assert two["loss_mask"][-12:] == [1] * 12
    # The first answer is supervised only if the history repeats it token for token.
    supervised = [token for token, bit in zip(two["token_ids"], two["loss_mask"], strict=True) if bit]
    assert supervised in (one["token_ids"][-12:] + two["token_ids"][-12:], two["token_ids"][-12:])


def test_a_prompt_beyond_the_targets_positions_is_named_before_anything_is_answered(target, tmp_path):
    limit = target.model.config.max_position_embeddings
    prompts = [PROMPTS[0], {"id": "far", "token_ids": [1] * limit}]
    with pytest.raises(DataError, match=f"prompt far has {limit} tokens"):
        answer_all(target, prompts, tmp_path / "rows.jsonl", SETTINGS)
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.long
def test_the_command_reads_the_recipe(tmp_path, capsys, monkeypatch):
    argv = command(tmp_path, CASES[2]["prompt"], "--config.regenerate.batch_size=1")
    assert run("regenerate", *argv) == 0
    assert rows_of(tmp_path / "new" / "rows.jsonl")["0"]["token_ids"] == CASES[2]["prompt"] + CASES[2]["output"][:5]
    assert run("regenerate", *argv, "--config.seed=1") == 2
    message = capsys.readouterr()
    assert "holds 1 answers, 1 of them cut by max_new_tokens." in message.out
    assert "seed: 42 before, 1 now" in message.err
    monkeypatch.setattr(regenerate, "load_target", lambda *_: pytest.fail("the rows are all there"))
    assert run("regenerate", *argv) == 0
    assert "holds all 1 answers already, 1 of them cut by max_new_tokens." in capsys.readouterr().out
    assert run("regenerate", *argv, "--config.regenerate.use_drafter=True", "--config.drafter.path=") == 0


# ------------------------------------------------------------------------------------------------------ a drafter


@pytest.mark.long
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), pytest.param(SamplingParams(0.7, 20, 0.8), marks=pytest.mark.slow)], ids=str
)
def test_rows_are_the_same_with_a_drafter(target, shared, tmp_path, sampling):
    plain, drafted = tmp_path / "plain.jsonl", tmp_path / "drafted.jsonl"
    settings = dataclasses.replace(SETTINGS, sampling=sampling)
    prompts = [{**row, "token_ids": row["token_ids"][: 9 + place]} for place, row in enumerate(PROMPTS)]  # one bucket
    answer_all(target, prompts, plain, settings)
    answer_all(target, prompts, drafted, settings, drafter_path=str(GOLDEN / "drafter"))
    assert drafted.read_bytes() == plain.read_bytes()
    metas = [(tmp_path / f"{name}.jsonl.meta.json").read_text() for name in ("plain", "drafted")]
    assert metas[0] == metas[1]


def test_a_queue_that_was_cut_is_computed_whole_again_so_that_its_rows_have_the_same_neighbours(
    target, rows_file, answered
):
    whole = rows_file.read_bytes()
    lines = whole.splitlines(keepends=True)
    queue = regenerate.queues([first_turn(row, 0, TextCodec(None, False)) for row in PROMPTS], SETTINGS.batch_size)
    first, second = (one.id for one in next(queue))
    rows_file.write_bytes(b"".join(line for line in lines if json.loads(line)["id"] != second))
    answer_all(target, PROMPTS, rows_file, SETTINGS)
    assert answered == [[first, second]] and rows_file.read_bytes() == whole


def test_a_missing_drafter_is_reported(tmp_path, capsys):
    argv = command(tmp_path, [1, 2], "--config.regenerate.use_drafter=True")
    assert run("regenerate", *argv, "--config.drafter.path=") == 2
    assert "config.drafter.path is not set" in capsys.readouterr().err
    argv += [f"--config.drafter.path={GOLDEN / 'drafter'}"]
    assert run("regenerate", *argv, "--config.drafter.head=eagle3") == 2
    assert "drafter.head is 'eagle3', but the drafter in" in capsys.readouterr().err
    # The decode section has the keys of drafts.
    assert run("regenerate", *argv, "--config.decode.num_drafts=9", "--config.decode.draft_window=2") == 2
    out, err = capsys.readouterr()
    assert "decode.num_drafts is 9, " in out and "decode.draft_window is 2, " in err


# ------------------------------------------------------------------------------------------------------ processes


def run_shares(target, path, count):
    """Runs `count` processes as threads that meet at the same barriers."""
    meeting = threading.Barrier(count, timeout=60)

    def run(index):
        share = ProcessGroup(index, count, lambda name: meeting.wait())
        answer_all(target, PROMPTS, path, SETTINGS, processes=share)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(run, index) for index in range(count)]:
            done.result()


def test_the_merged_file_of_several_processes_is_that_of_one(target, shared, rows_file, tmp_path):
    path = tmp_path / "several" / "rows.jsonl"
    run_shares(target, path, 3)
    assert path.read_bytes() == rows_file.read_bytes()
    assert sorted(file.name for file in path.parent.iterdir()) == ["rows.jsonl", "rows.jsonl.meta.json"]


def test_rows_of_any_part_are_not_answered_again_whatever_the_number_of_processes(
    target, shared, rows_file, tmp_path, answered
):
    folder = tmp_path / "several"
    path = folder / "rows.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerFiles, "merge", lambda self: None)  # they die before
        patch.setattr(regenerate, "report", lambda *_: None)
        run_shares(target, path, 3)
    (folder / "rows.jsonl.part-1-of-3.jsonl").unlink()
    part = folder / "rows.jsonl.part-2-of-3.jsonl"
    part.write_bytes(part.read_bytes() + b'{"id": "p0", "tok')  # a torn line is cut off
    answered.clear()
    run_shares(target, path, 2)
    names = sum(answered, [])
    assert len(names) == 2 and len(set(names)) == 2
    assert path.read_bytes() == rows_file.read_bytes()


def test_a_merge_that_died_after_its_renaming_is_finished(target, shared, rows_file):
    whole = rows_file.read_bytes()
    part = rows_file.with_name("rows.jsonl.part-0-of-2.jsonl")
    part.write_bytes(whole[: whole.index(b"\n") + 1])
    answer_all(target, PROMPTS, rows_file, SETTINGS)
    assert rows_file.read_bytes() == whole and not part.exists()


def test_parts_that_process_0_does_not_see_are_reported(target, shared, tmp_path):
    path = tmp_path / "rows.jsonl"
    with pytest.raises(DataError, match="2 of 5 rows are in none of its parts"):
        answer_all(target, PROMPTS, path, SETTINGS, processes=ProcessGroup(0, 2))
