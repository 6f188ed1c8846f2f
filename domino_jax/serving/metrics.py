"""The counters of /metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from domino_jax.serving.requests import AnswerPart, ServedRequest


class Metrics:
    """Prometheus metrics with vLLM's names after `prefix`."""

    def __init__(self, prefix: str = "domino"):
        self.registry = CollectorRegistry()
        seconds = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)

        def new(kind: type, name: str, text: str, **choices):
            return kind(f"{prefix}:{name}", text, registry=self.registry, **choices)

        self.running = new(Gauge, "num_requests_running", "Requests that have a row.")
        self.waiting = new(Gauge, "num_requests_waiting", "Requests that wait for a row.")
        self.compiling = new(Gauge, "num_programs_compiling", "Programs that are compiled while others run.")
        self.prompt = new(Counter, "prompt_tokens", "Tokens of prompts.")
        self.generated = new(Counter, "generation_tokens", "Tokens of answers.")
        self.drafts = new(Counter, "spec_decode_num_drafts", "Rounds.")
        self.prefix_waits = new(
            Counter, "prefix_waits", "Texts not reused because a program for it was being compiled."
        )
        self.draft_tokens = new(Counter, "spec_decode_num_draft_tokens", "Tokens that were drafted.")
        self.accepted = new(Counter, "spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self.first = new(Histogram, "time_to_first_token_seconds", "Arrival to first token.", buckets=seconds)
        self.between = new(Histogram, "inter_token_latency_seconds", "Between two tokens.", buckets=seconds)
        self.whole = new(Histogram, "e2e_request_latency_seconds", "Arrival to last token.", buckets=seconds)

    def count(self, request: ServedRequest, part: AnswerPart, last: float | None) -> None:
        """A part that is cut to what its client gets. last: when the part before was read; None: there was none."""
        new, rounds = len(part.token_ids), part.accept_lengths
        if last is None:
            self.prompt.inc(len(request.prompt))
            self.first.observe(part.at - request.arrived)
        else:
            for _ in range(new):
                self.between.observe((part.at - last) / new)
        self.generated.inc(new)
        self.drafts.inc(len(rounds))
        self.draft_tokens.inc(part.drafts)
        self.accepted.inc(sum(rounds) - len(rounds))
        if part.finish_reason:
            self.whole.observe(part.at - request.arrived)
