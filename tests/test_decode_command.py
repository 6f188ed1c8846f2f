"""decode.py: one run over the golden models, whose files and figures the tests read; and every mistake it must tell."""

import dataclasses
import json
import pathlib

import pytest

from domino_jax import cli, decode
from domino_jax.errors import DominoError

ROOT = pathlib.Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden" / "tied_shift"
TARGET, DRAFTER = GOLDEN / "target", GOLDEN / "drafter"
CASES = json.loads((GOLDEN / "golden.json").read_text())["generate"]
NEW = 24


def write_prompts(folder, rows):
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def arguments(prompts_file, output, **changes):
    """The command line of a small run; changes replace or add flags, with __ for the dots."""
    values = {
        "config": ROOT / "configs" / "tiny.py",
        "config.target.path": TARGET,
        "config.drafter.path": DRAFTER,
        "config.decode.max_new_tokens": NEW,
        "config.decode.cache_length": 128,
        "config.decode.batch_size": 2,
        "prompts": prompts_file,
        "prompt": None,
        "output": output,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return ["decode", *(f"--{key}={value}" for key, value in values.items() if value is not None)]


def start(capsys, argv):
    """Runs the command in this process; exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as left:
        cli.run(decode.main, ("config", "output"), ("prompts", "prompt"), argv)
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(argv, output folder) of a run of three modes over the golden prompts, two rows at a time."""
    folder = tmp_path_factory.mktemp("decode")
    prompts = write_prompts(folder, [{"id": f"p{i}", "token_ids": case["prompt"]} for i, case in enumerate(CASES)])
    argv = arguments(prompts, folder / "out")
    with pytest.raises(SystemExit) as left:
        cli.run(decode.main, ("config", "output"), ("prompts", "prompt"), argv)
    assert left.value.code == 0
    return argv, folder / "out"


def generations(output):
    return [json.loads(line) for line in (output / "generations.jsonl").read_text().splitlines()]


def test_every_prompt_has_a_row_in_every_mode_with_the_golden_tokens(finished):
    rows = generations(finished[1])
    assert len(rows) == 3 * len(CASES)
    for index, case in enumerate(CASES):
        own = {row["mode"]: row for row in rows if row["id"] == f"p{index}"}
        assert set(own) == {"autoregressive", "backbone", "domino"}
        for row in own.values():
            assert row["token_ids"] == case["output"][:NEW]
            assert (row["text"], row["finish_reason"]) == (None, "length")
        assert own["autoregressive"]["accept_lengths"] == []


def test_accept_lengths_are_those_of_the_golden_run_cut_to_the_tokens_kept(finished):
    domino = {row["id"]: row for row in generations(finished[1]) if row["mode"] == "domino"}
    for index, case in enumerate(CASES):
        found, golden = domino[f"p{index}"]["accept_lengths"], case["accept_lengths"]
        assert 1 + sum(found) == NEW
        assert found[:-1] == golden[: len(found) - 1] and found[-1] <= golden[len(found) - 1]


def test_the_report_measures_what_the_generations_hold(finished):
    report = json.loads((finished[1] / "report.json").read_text())
    lengths = [row["accept_lengths"] for row in generations(finished[1]) if row["mode"] == "domino"]
    domino = report["modes"]["domino"]
    assert domino["tau_pooled"] == sum(map(sum, lengths)) / sum(map(len, lengths))
    assert domino["tokens"] == NEW * len(CASES)
    assert len(domino["accept_rate_by_position"]) == 8 and report["verify_width"] == 9
    assert report["identical_outputs"]["domino"]["same"] == report["identical_outputs"]["domino"]["of"] == 4
    assert set(domino["time_split"]) == {"unit", "draft", "head", "verify", "other", "round"}
    assert domino["speedup"] > 0 and domino["compile_seconds"] > 0 and report["straight_step_ms"] > 0
    assert domino["answers_right"] is None and report["template_sha256"] is None and report["thinking"] is False
    assert report["prompts"]["count"] == 4 and report["settings"]["max_new_tokens"] == NEW


def test_a_finished_folder_is_shown_and_left_alone(finished, capsys):
    argv, output = finished
    before = (output / "report.json").stat().st_mtime_ns
    code, said, _ = start(capsys, argv)
    assert code == 0 and "holds a finished decoding" in said and "τ pooled" in said
    assert (output / "report.json").stat().st_mtime_ns == before


def test_a_finished_folder_of_other_settings_is_refused(finished, capsys):
    argv, _ = finished
    code, _, error = start(capsys, [*argv, "--config.decode.seed=7"])
    assert code == 2
    assert "settings.seed: 0 there, 7 now" in error and len(error.strip().splitlines()) <= 5


def test_an_interrupted_run_keeps_what_it_had_and_starts_over(finished, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "generations.jsonl").write_text('{"id": "p0", "mode": "dom')
    prompts = write_prompts(tmp_path, [{"token_ids": CASES[0]["prompt"]}])
    argv = arguments(prompts, output, config__decode__modes="('autoregressive',)", config__drafter__path=None)
    argv += ["--config.decode.max_new_tokens=4", "--config.decode.stop_ids=(1,2)"]
    with pytest.raises(SystemExit) as left:
        cli.run(decode.main, ("config", "output"), ("prompts", "prompt"), argv)
    assert left.value.code == 0
    (row,) = generations(output)
    assert row["token_ids"] == CASES[0]["output"][:4] and row["id"] == "0"


def test_stop_ids_are_the_folders_and_the_recipes_and_ignore_eos_drops_the_folders():
    from domino_jax.loading import load_models, load_target

    loaded = load_target(str(TARGET), "float32")
    assert loaded.stop_ids == (257,) and loaded.tokenizer is None
    models = load_models(loaded, None, ("autoregressive",))
    settings = decode.DecodeSettings(("autoregressive",), 8, 64, stop_ids=(7,))
    assert decode.new_generator(models, loaded.stop_ids, settings).stop_ids.tolist() == [7, 257]
    ignoring = dataclasses.replace(settings, ignore_eos=True)
    assert decode.new_generator(models, loaded.stop_ids, ignoring).stop_ids.tolist() == [7]


GOOD = [{"token_ids": [32, 33, 34]}]


@pytest.mark.parametrize(
    ("rows", "changes", "code", "said"),
    [
        (GOOD, {"config__drafter__path": ""}, 2, "need a drafter, and none is named"),
        (GOOD, {"config__drafter__path": "./nowhere"}, 2, "nowhere does not exist"),
        (GOOD, {"config__target__path": "./nowhere"}, 2, "nowhere does not exist"),
        (GOOD, {"config__drafter__path": ROOT / "tests/golden/untied_noshift/drafter"}, 3, "but the target has"),
        (GOOD, {"config__decode__modes": "('tree',)"}, 2, "list some of autoregressive"),
        (GOOD, {"prompt": "Hello"}, 2, "--prompts and --prompt are both given"),
        ([{"id": "p", "text": "x"}], {}, 3, "has exactly one of messages, prompt, token_ids"),
        ([{"id": "p", "messages": [{"role": "user", "content": "x"}]}], {}, 3, "holds no tokenizer"),
        ([{"id": "far", "token_ids": [1] * 120}], {}, 3, "prompt far needs 153 cache rows"),
        ([{"id": "odd", "token_ids": [99_999]}], {}, 3, "prompt odd holds token id 99999"),
        (None, {"prompts": None, "prompt": "Hello"}, 3, "holds no tokenizer"),
        (None, {"prompts": "nowhere.jsonl"}, 2, "there is no such file"),
    ],
)
def test_a_mistake_is_one_short_message_and_its_exit_code(tmp_path, capsys, rows, changes, code, said):
    prompts = write_prompts(tmp_path, rows) if rows else None
    found, _, error = start(capsys, arguments(prompts, tmp_path / "out", **changes))
    assert (found, "Traceback" in error) == (code, False)
    assert said in error and len(error.strip().splitlines()) <= 5


def test_an_output_that_is_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "out").write_text("")
    code, _, error = start(capsys, arguments(write_prompts(tmp_path, GOOD), tmp_path / "out"))
    assert code == 2 and "cannot be written" in error


def test_a_bare_text_is_a_users_message_where_there_is_a_chat_template():
    class Tokenizer:
        chat_template = "{{ messages }}"

    assert decode.prompt_row("Hi", Tokenizer()) == {"id": "prompt", "messages": [{"role": "user", "content": "Hi"}]}
    assert decode.prompt_row("Hi", None) == {"id": "prompt", "prompt": "Hi"}


def test_answers_are_judged_only_where_a_row_brings_its_checker():
    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return "".join(map(chr, ids))

    task = {
        "id": "a",
        "kind": "stub",
        "answer_check": {},
        "messages": [{"role": "user", "content": "```python\ndef f(a):\n    return a\n```"}],
    }
    right = '```python\ndef f(a):\n    raise NotImplementedError("f")\n```'
    answers = [decode.Generation(list(map(ord, text)), [], "stop") for text in (right, right, "no")]
    runs = {"domino": decode.ModeRun("domino", answers, decode.Clock())}
    rows = [task, {"id": "b", "prompt": "x"}, {**task, "id": "c"}]
    assert decode.count_right(runs, rows, Tokenizer()) == {"domino": 1}
    assert decode.count_right(runs, rows, None) is None
    assert decode.count_right(runs, [{"id": "b"}] * 3, Tokenizer()) is None


def test_a_head_is_asked_for_before_anything_runs():
    from domino_jax.loading import check_head

    check_head(False, ("autoregressive", "backbone"))
    with pytest.raises(DominoError, match="plain DFlash one without a Domino head"):
        check_head(False, ("autoregressive", "domino"))
