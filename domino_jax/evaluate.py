"""Compare drafters on answers of the target, without decoding: τ for every number of drafts from one pass.

    python -m domino_jax.evaluate --config=configs/tiny.py --output=/tmp/evaluated
    python -m domino_jax.evaluate --config=configs/qwen3_8b.py --answers=ROWS.jsonl --drafters=DIR_A,DIR_B --output=DIR

The target's choice after a prefix does not depend on the drafter, so for a given answer the rounds of a decoding follow
from what a drafter would have had accepted at each token (docs/method.md). --answers is a file that
domino_jax.regenerate wrote, or the output folder of domino_jax.decode. Without it the target answers the prompts of
eval.prompts first, with the sampling of config.decode, into OUTPUT/answers.jsonl, where a later call finds them.

    python -m domino_jax.evaluate --config=RECIPE --server=http://127.0.0.1:30000 --drafters=DIR --output=DIR

asks a running server for greedy answers to these prompts (docs/serving.md). It reports whether they are the target's
own, whether the server makes the same prompts of messages, and its τ beside that of the pass. Exit code 3: an answer
is wrong.

OUTPUT has evaluation.json, evaluation.html and plots/; another call replaces them. --round_seconds=measure also times
rounds on this device, for the speed-up of each number of drafts.
"""

import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from domino_jax import regenerate
from domino_jax.data.answer_files import AnswerFiles, find_rows
from domino_jax.data.chat import TextCodec
from domino_jax.data.prompts import read_jsonl
from domino_jax.decoding.answers import AnswerPasses, TargetAnswer, check_answers, count_cut, read_answers
from domino_jax.decoding.conversations import first_turn
from domino_jax.decoding.requests import ROW_VALUES
from domino_jax.decoding.settings import DRAFT, DecodeSettings
from domino_jax.evals.acceptance_figures import widths_of
from domino_jax.evals.evaluation import build_evaluation, console_evaluation, drafter_names, write_evaluation
from domino_jax.evals.report import output_folder
from domino_jax.evals.round_times import round_seconds
from domino_jax.evals.run_files import ANSWERS
from domino_jax.evals.server_check import compare_tau, judge_server
from domino_jax.evals.servers import Server, ask_prompts, server_row
from domino_jax.method.exact import Accepted
from domino_jax.method.pair import Pair
from domino_jax.method.settings import SamplingParams
from domino_jax.recipe import cli, rules
from domino_jax.recipe.builders import loader_of
from domino_jax.recipe.models import lower_to_drafter, refuse_other_head
from domino_jax.recipe.open_keys import decode_settings
from domino_jax.recipe.prompt_rows import read_file_rows
from domino_jax.runtime import distributed
from domino_jax.runtime.agreement import refuse_differences
from domino_jax.runtime.distributed import say
from domino_jax.runtime.errors import DataError, DominoError
from domino_jax.weights import hf
from domino_jax.weights.drafter import stored_head
from domino_jax.weights.identity import drafter_identity, target_identity
from domino_jax.weights.loading import keep_compiled, use_exact_matmuls

SERVER_ANSWERS = "server_answers.jsonl"


def main(flags: cli.Flags) -> int:
    # 1. The recipe, and what is compared.
    config = flags.config
    if flags.server and flags.answers:
        raise DominoError("--server asks for new answers, and --answers names a file of them; give one of the two.")
    if flags.requests < 1:
        raise DominoError(f"--requests is {flags.requests}, expected 1 or more.")
    rules.check(config, "evaluate", flags.set_keys, flags.given)
    paths = drafter_paths(flags)
    output = output_folder(flags.output)

    # 2. The processes, where they share a mesh.
    if (config.decode.mesh.data, config.decode.mesh.tensor) != (1, 1):
        distributed.initialize(flags.distributed, preemptible=False)

    # 3. The devices, and the answers, made by a server or the target where none are given.
    keep_compiled()
    settings = decode_settings(config.decode, config.drafter.head, config.data.train)
    settings = settings.change(modes=(DRAFT,), tree=None, num_drafts=None, parity="near_tie", concurrency=())
    use_exact_matmuls(settings.dtype)
    loader = loader_of(flags, settings)
    identity = target_identity(config.target.path)
    if flags.server:
        source, asked = str(output / SERVER_ANSWERS), ask_server(flags, settings, identity, output / SERVER_ANSWERS)
    else:
        source = flags.answers or str(make_answers(config, settings, identity, output / ANSWERS))
    file = answers_file(source)

    with loader.on_mesh():
        # 4. Target and answers.
        loaded = loader.target()
        limit = config.decode.num_prompts or None
        answers = read_answers(file, TextCodec(loaded.tokenizer, config.decode.thinking), limit)
        if flags.server:
            stated = {row["id"]: row["server"] for _, row in read_jsonl(source)}
            answers = [answer for answer in answers if stated[answer.id]["whole"]]
            if not answers:
                raise DataError(f"{source}: no text encodes back to itself, so none can be judged; ask for token ids.")
        if len(answers) == limit:
            say(f"the first {limit} answers (decode.num_prompts; 0 takes all)")
        target = Pair(loaded.model, loaded.params)
        check_answers(answers, target, source)
        passes = AnswerPasses(answers, settings.drafting, settings.batch_size)
        refuse_differences({"the answers": passes.digest})
        server = judge_server(passes, target, stated, asked, loaded, settings) if flags.server else None
        chosen = server["chosen"] if server else passes.chosen_share(target, source)
        if cut := count_cut([answer.token_ids for answer in answers], loaded.stop_ids):
            say(f"{cut} of the {len(answers)} answers end without a stop token: a limit cut them.")

        # 5. Each drafter: its weights, its pass, its rounds.
        accepted, drafters, seconds = {}, {}, {}
        for path in paths:
            models = loader.models(loaded, path, (DRAFT,))
            accepted[path], drafter = judge(models, settings, answers, source), models.drafter.config
            drafters[path] = {"head": drafter.head, "block_size": drafter.block_size, **drafter_identity(path)}
            if server:
                drafters[path]["server"] = compare_tau(answers, accepted[path], server["acceptance"])
            if flags.round_seconds:
                prompts = [answer.prompt for answer in answers[: settings.batch_size]]
                seconds[path] = round_seconds(models, settings, prompts, widths_of(drafter.num_drafts))
            say(f"{path}: judged")

    # 6. The report.
    temperatures = sorted({answer.request.sampling.temperature for answer in answers})
    origin = {
        "target": {"path": config.target.path, "quantize": config.target.quantize, **identity},
        "dtype": settings.dtype,
        "answers": {"source": source, "chosen": chosen, "temperatures": temperatures, "cut": cut},
        "server": server,
    }
    evaluation = build_evaluation(answers, accepted, drafters, origin, seconds)
    if distributed.is_primary():
        write_evaluation(output, evaluation)
        console_evaluation(evaluation)
    say(f"written to {output}")
    return DataError.exit_code if server and server["texts"]["wrong"] else 0


def drafter_paths(flags: cli.Flags) -> tuple[str, ...]:
    """The folders to compare, each with the head that the command line names, refused before the target answers."""
    path = flags.config.drafter.path
    paths = flags.drafters or ((path,) if path else ())
    if not paths:
        raise DominoError("no drafter is named: give --drafters=DIR,DIR or --config.drafter.path=DIR.")
    for folder in paths:
        refuse_other_head(stored_head(folder), flags.head, folder)
    drafter_names(paths)
    return paths


# ------------------------------------------------------------------------------------------------------- answers


def make_answers(config, settings: DecodeSettings, identity: Mapping[str, Any], output: Path) -> Path:
    """Lets the target answer the prompts of the recipe, sampled as config.decode says, and returns the file."""
    rows = prompt_rows(config)
    origin = regenerate.origin_of(rows, identity, config.target.quantize, settings)
    regenerate.answer_rows(config, rows, output, origin, settings.change(batch_size=config.regenerate.batch_size))
    return output


def prompt_rows(config) -> list[dict[str, Any]]:
    if not config.eval.prompts:
        raise DominoError(
            "there are no answers: give --answers=ROWS.jsonl of domino_jax.regenerate, or prompts to answer with"
            " --config.eval.prompts=PROMPTS.jsonl."
        )
    limit, skip_bad = config.decode.num_prompts, config.data.skip_bad_rows
    return read_file_rows(config.eval.prompts, limit, skip_bad, regenerate.refuse_unanswerable)


def ask_server(flags: cli.Flags, settings: DecodeSettings, identity: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Lets the server of --server answer the prompts of the recipe into `output`, greedily.

    Answers of a call that was cut off are taken over; finished ones are asked for again, because the server may have
    changed.

    Returns:
        "url", "engine", "model", and "gained" of ask_prompts.
    """
    config, folder = flags.config, hf.resolve_folder(flags.config.target.path)
    tokenizer = hf.load_tokenizer(folder)
    codec, stop_ids = TextCodec(tokenizer, settings.thinking), hf.stop_ids(folder, tokenizer)
    server = Server(flags.server, os.environ.get("DOMINO_API_KEY"), config.target.path, settings.max_new_tokens)
    rows = [{key: value for key, value in row.items() if key not in ROW_VALUES} for row in prompt_rows(config)]
    prompts = [first_turn(row, place, codec) for place, row in enumerate(rows)]
    greedy = settings.change(sampling=SamplingParams())
    origin = regenerate.origin_of(rows, identity, config.target.quantize, greedy)
    files = AnswerFiles(output, [row["id"] for row in rows], {**origin, "server": server.facts})
    if output.exists() and list(find_rows([output])) == files.ids:
        output.unlink()
    gained = ask_prompts(server, prompts, files, functools.partial(server_row, codec, stop_ids), flags.requests)
    return {**server.facts, "gained": gained}


def answers_file(source: str) -> str:
    """The file of answers at `source`: a file of rows, or the output folder of `decode`."""
    folder = Path(source).expanduser()
    if not folder.is_dir():
        return source
    if not (folder / ANSWERS).is_file():
        raise DataError(f"{folder} holds no finished decoding; name a folder of `decode`, or a file of `regenerate`.")
    return str(folder / ANSWERS)


# ------------------------------------------------------------------------------------------------------ drafters


def judge(models: Pair, settings: DecodeSettings, answers: Sequence[TargetAnswer], source: str) -> list[Accepted]:
    """The drafts of one drafter that the target accepts in the answers; source: names them in messages."""
    check_answers(answers, models, source)
    config = models.drafter.config
    drafting = lower_to_drafter(settings, config).drafting_of(DRAFT, config)
    return AnswerPasses(answers, drafting, settings.batch_size)(models)


if __name__ == "__main__":
    optional = ("answers", "server", "requests", "drafters", "round_seconds", "distributed")
    cli.run(main, required=("config", "output"), optional=optional)
