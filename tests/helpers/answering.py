"""A server in this process that answers from rows of a training, in the form of each engine, with faults on request."""

import contextlib
import copy
import http.server
import json
import threading

from tests.helpers.commands import run
from tests.helpers.paths import ROOT
from tests.helpers.serving import post

TARGET, DRAFTER = ROOT / "assets" / "tiny_qwen3", ROOT / "assets" / "tiny_domino"
IDS = [f"train-000{number}" for number in (0, 2, 3, 6)]
MOST = 128  # new tokens of the answers in the repository
OVERFIT = (
    "--distributed=off",
    f"--config.train.start_from={DRAFTER}",
    "--config.data.regenerate=False",
    "--config.train.steps=80",
    "--config.train.learning_rate=2e-3",
    "--config.eval.every=0",
    "--config.eval.final=False",
    "--config.checkpoint.every=80",
)


def read_rows(path) -> dict[str, dict]:
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


def stored_answers() -> dict[str, tuple[list[int], list[int]]]:
    """By id (the prompt's ids, the answer's) of the tiny target."""
    answers = {}
    for name, row in read_rows(TARGET / "answers_train.jsonl").items():
        length = row["loss_mask"].index(1)
        answers[name] = row["token_ids"][:length], row["token_ids"][length:]
    return {name: answers[name] for name in IDS}


def check_flags(folder) -> list[str]:
    """The flags of evaluate for these prompts, but for --server."""
    rows, prompts = read_rows(TARGET / "prompts_train.jsonl"), folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(rows[name]) + "\n" for name in IDS))
    flags = ["--config.decode.num_prompts=0", f"--config.decode.max_new_tokens={MOST}", f"--output={folder / 'out'}"]
    return [*flags, f"--config={ROOT / 'configs' / 'tiny.py'}", f"--config.eval.prompts={prompts}"]


def overfit(folder) -> str:
    """The exported folder of a drafter that has learned the stored answers by heart."""
    answers, rows = read_rows(TARGET / "answers_train.jsonl"), folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(answers[name]) + "\n" for name in IDS) * 8)
    flags = ["--config=tiny", f"--workdir={folder / 'run'}", f"--config.data.train={rows}", *OVERFIT]
    assert run("train", *flags) == 0
    return str(folder / "run" / "export")


def assert_full_blocks(port: int) -> None:
    """Every round of the stored answers keeps all 8 drafts, but for the last, which the answer's end cuts."""
    for prompt, answer in stored_answers().values():
        body = {"model": "tiny_qwen3", "prompt": prompt, "max_tokens": 96, "temperature": 0, "return_token_ids": True}
        status, _, raw = post(port, body, "/v1/completions")
        assert status == 200, raw
        assert raw["choices"][0]["token_ids"] == answer[:96]
        rounds = raw["metrics"]["speculative_decoding"]
        assert rounds["num_spec_steps"] == -(-(min(len(answer), 96) - 1) // 9)
        assert rounds["acceptance_histogram"][8] >= rounds["num_spec_steps"] - 1


class Answering(http.server.BaseHTTPRequestHandler):
    """Its server's attributes hold the answers: engine, key, answers (by id), counts (by id), extra_tokens of every
    prompt, tokenizer, refused (ids), and asked, the paths and bodies that arrived."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/metrics":
            return self.reply(200, self.server.metrics())
        card = {"id": self.server.model, "object": "model", "owned_by": self.server.engine}
        return self.reply(200, {"object": "list", "data": [card]})

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.asked.append((self.path, body))
        if server.key and self.headers["Authorization"] != f"Bearer {server.key}":
            return self.reply(401, {"error": "Unauthorized"})
        name = server.name_of(body)
        prompt, answer = server.prompts[name], server.answers[name]
        if name in server.refused:
            return self.reply(400, {"error": {"message": "This model's maximum context length is 64 tokens."}})
        tokens = len(prompt) + (0 if "input_ids" in body or type(body.get("prompt")) is list else server.extra_tokens)
        most = body.get("max_tokens") or body.get("n_predict") or body["sampling_params"]["max_new_tokens"]
        stopped = len(answer) < MOST and most > 1 and name not in server.limited
        return self.reply(200, server.forms[self.path](answer[:most], stopped, tokens, server.counts.get(name)))

    def reply(self, status, content):
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments):
        pass


class AnsweringServer(http.server.ThreadingHTTPServer):
    """It answers as vLLM 0.33.0, SGLang 0.5.23 and the llama.cpp of llama-cpp-python 0.3.36 do (2026-11-28)."""

    daemon_threads = True

    def __init__(self, engine, tokenizer, per_request=True):
        super().__init__(("127.0.0.1", 0), Answering)
        self.engine, self.tokenizer, self.per_request = engine, tokenizer, per_request
        self.model, self.key, self.extra_tokens = "tiny_qwen3", None, 0
        self.asked, self.refused, self.limited, self.counts = [], set(), set(), {}
        stored = stored_answers()
        self.prompts = {name: prompt for name, (prompt, _) in stored.items()}
        self.answers = {name: answer for name, (_, answer) in stored.items()}
        self.messages = {name: row["messages"] for name, row in read_rows(TARGET / "prompts_train.jsonl").items()}
        self.forms = {
            "/v1/completions": self.completion,
            "/v1/chat/completions": self.chat,
            "/generate": self.generate,
            "/completion": self.llama,
        }

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def name_of(self, body):
        if "messages" in body:
            return next(name for name in IDS if self.messages[name] == body["messages"])
        ids = body.get("input_ids") or body["prompt"]
        return next(name for name in IDS if self.prompts[name] == ids)

    def text(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def completion(self, ids, stopped, tokens, rounds):
        choice = {"index": 0, "text": self.text(ids), "finish_reason": "stop" if stopped else "length"}
        raw = {"choices": [choice | {"token_ids": ids}], "usage": {"prompt_tokens": tokens}, "metrics": None}
        if rounds and self.per_request:
            most = max(rounds["drafts"] // len(rounds["lengths"]), 1)
            histogram = [rounds["lengths"].count(length + 1) for length in range(most + 1)]
            raw["metrics"] = {
                "speculative_decoding": {
                    "acceptance_histogram": histogram,
                    "num_spec_steps": len(rounds["lengths"]),
                    "num_draft_tokens": rounds["drafts"],
                }
            }
        return raw

    def chat(self, ids, stopped, tokens, rounds):
        message = {"role": "assistant", "content": self.text(ids), "reasoning_content": None}
        choice = {"index": 0, "message": message, "finish_reason": "stop" if stopped else "length"}
        return {"choices": [choice], "usage": {"prompt_tokens": tokens, "completion_tokens": len(ids)}}

    def generate(self, ids, stopped, tokens, rounds):
        reason = {"type": "stop", "matched": ids[-1]} if stopped else {"type": "length", "length": len(ids)}
        meta = {"id": "0", "finish_reason": reason, "prompt_tokens": tokens, "completion_tokens": len(ids)}
        if rounds:
            meta |= {
                "spec_verify_ct": len(rounds["lengths"]),
                "spec_num_proposed_drafts": rounds["drafts"],
                "spec_correct_drafts_histogram": [rounds["lengths"].count(length + 1) for length in range(9)],
            }
        return {"text": self.text(ids), "output_ids": ids, "meta_info": meta}

    def llama(self, ids, stopped, tokens, rounds):
        timings = {"predicted_n": len(ids)}
        if rounds:
            accepted = sum(rounds["lengths"]) - len(rounds["lengths"])
            timings |= {"draft_n": rounds["drafts"], "draft_n_accepted": accepted}
        stop = "eos" if stopped else "limit"
        raw = {"content": self.text(ids), "tokens": ids, "tokens_evaluated": tokens, "stop_type": stop}
        return raw | {"timings": timings}

    def metrics(self):
        """vLLM's counters after all requests for whole answers so far, of two engines, the second of which is idle."""
        asked = [self.name_of(body) for _, body in self.asked if body.get("return_token_ids")]
        rounds = [self.counts[name] for name in asked if name in self.counts]
        lengths = [length for one in rounds for length in one["lengths"]]
        values = {
            "drafts_total{": len(lengths),
            "draft_tokens_total{": sum(one["drafts"] for one in rounds),
            "accepted_tokens_total{": sum(lengths) - len(lengths),
            'accepted_tokens_per_pos_total{position="0",': sum(length > 1 for length in lengths),
            'accepted_tokens_per_pos_total{position="1",': sum(length > 2 for length in lengths),
        }
        lines = ["# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts."]
        for name, value in values.items():
            for engine, count in (("0", value), ("1", 0)):
                label = f'engine="{engine}",model_name="tiny"'
                lines.append(f"vllm:spec_decode_num_{name}{label}}} {float(count)}")
        return "\n".join(lines)


@contextlib.contextmanager
def answering(engine, tokenizer, per_request=True, **attributes):
    """A running server; attributes replace its own."""
    server = AnsweringServer(engine, tokenizer, per_request)
    for name, value in attributes.items():
        assert hasattr(server, name), name
        setattr(server, name, copy.deepcopy(value) if name == "answers" else value)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
