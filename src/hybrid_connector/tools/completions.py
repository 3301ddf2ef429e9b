"""What does an OpenAI completions endpoint answer, how soon, and is it the same answer?"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from hybrid_connector.core.errors import PeerError

NUM_TOP = 5
"""Alternatives asked for at each token, to tell a near tie from a wrong answer."""

MAX_TIE_NATS = 0.1
"""P and D compute the last prompt token as a step of its own, an aggregated engine computes it with the rest. In
bfloat16 the two differ by rounding, which may turn a tie between two tokens; a wrong state moves log-probabilities by
whole nats. A parting counts as a tie up to this gap."""

_TEXT = (
    "A prefill engine reads the whole prompt at once and leaves its state behind: keys and values of every token in "
    "the attention layers, and in the recurrent layers one short convolution window and one matrix. A decode engine "
    "fetches that state and goes on from there, token by token, as if it had read the prompt itself. "
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy completion. ``top``: at each position the likeliest tokens and their log-probabilities (nats)."""

    prompt_tokens: int
    tokens: tuple[str, ...]
    top: tuple[Mapping[str, float], ...]
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Two greedy answers side by side.

    ``parted_at``: first position where they differ, ``None`` for equal ones. ``gap_nats``: how much likelier the
    reference thought its own token than the other's there; ``None`` where the other's was not among its alternatives.
    """

    parted_at: int | None
    gap_nats: float | None = None

    def within(self, max_gap_nats: float) -> bool:
        """Equal, or parted where the reference itself saw a tie."""
        return self.parted_at is None or (self.gap_nats is not None and self.gap_nats <= max_gap_nats)


def text_of(num_characters: int, salt: int = 0) -> str:
    """Differs from the first character on between lengths and salts: prompts must not share cached prefixes."""
    start = (num_characters * 7 + salt * 31) % len(_TEXT)
    return (_TEXT[start:] + _TEXT * (num_characters // len(_TEXT) + 1))[:num_characters]


def agree(answer: Answer, reference: Answer) -> Agreement:
    """Compare up to the first difference; after it the two continue different texts."""
    for position, (ours, theirs) in enumerate(zip(answer.tokens, reference.tokens, strict=False)):
        if ours != theirs:
            top = reference.top[position]
            gap = top[theirs] - top[ours] if ours in top and theirs in top else None
            return Agreement(position, gap)
    if len(answer.tokens) != len(reference.tokens):
        return Agreement(min(len(answer.tokens), len(reference.tokens)))
    return Agreement(None)


def complete(
    client: httpx.Client, url: str, prompt: str, *, max_tokens: int, extra: Mapping[str, Any] | None = None
) -> Answer:
    """Stream a greedy completion. Raises ``PeerError`` with the server's words for anything but a full answer."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": NUM_TOP,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **(extra or {}),
    }
    tokens: list[str] = []
    top: list[Mapping[str, float]] = []
    prompt_tokens, first_token_s = 0, 0.0
    began = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            text = response.read().decode(errors="replace")
            raise PeerError(f"{url}: HTTP {response.status_code}: {text:.500}")
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip()
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise PeerError(f"{url}: {event['error']!s:.500}")
            if usage := event.get("usage"):
                prompt_tokens = usage["prompt_tokens"]
            for choice in event["choices"]:
                if (logprobs := choice.get("logprobs")) and logprobs["tokens"]:
                    first_token_s = first_token_s or time.perf_counter() - began
                    tokens.extend(logprobs["tokens"])
                    top.extend(logprobs["top_logprobs"])
                if choice.get("finish_reason") == "error":
                    raise PeerError(f"{url}: the request ended with an error")
    if len(tokens) != max_tokens:
        raise PeerError(f"{url}: expected {max_tokens} tokens, got {len(tokens)}")
    return Answer(prompt_tokens, tuple(tokens), tuple(top), first_token_s)
