"""Does a deployment answer as another one does? The same prompts through both, greedily, and every token compared.

Up to the first token that differs, the log-probabilities that both gave to the shared tokens are compared as well: they
differ by rounding, and by more where a state is wrong but the likeliest token is still the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.table import Table

from hybrid_connector.core.errors import ConfigError, PeerError
from hybrid_connector.tools.completions import Agreement, Answer, agree, complete, text_of
from hybrid_connector.tools.sweeping.deployments import Endpoint

NUM_PROMPTS = 16
"""Where no file brings others."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt's two answers.

    num_shared: leading tokens that are the same. differences_nats: at each of them where both sides told the token's
    log-probability, how far apart they are.
    """

    prompt_tokens: int
    agreement: Agreement
    num_shared: int
    differences_nats: tuple[float, ...]

    @property
    def mean_nats(self) -> float | None:
        """``None`` where nothing could be compared."""
        return sum(self.differences_nats) / len(self.differences_nats) if self.differences_nats else None

    @property
    def max_nats(self) -> float | None:
        """``None`` where nothing could be compared."""
        return max(self.differences_nats, default=None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prompt through a deployment and the reference: a comparison, or why there is none."""

    deployment: str
    prompt: int
    comparison: Comparison | None
    error: str | None = None

    def agrees(self, max_gap_nats: float) -> bool:
        """The answers are the same, or part where the reference itself saw a tie."""
        return self.comparison is not None and self.comparison.agreement.within(max_gap_nats)

    def as_document(self, max_gap_nats: float) -> dict[str, Any]:
        """For programs."""
        document: dict[str, Any] = {
            "deployment": self.deployment,
            "prompt": self.prompt,
            "agrees": self.agrees(max_gap_nats),
            "error": self.error,
        }
        if self.comparison is not None:
            document |= {
                "prompt_tokens": self.comparison.prompt_tokens,
                "shared_tokens": self.comparison.num_shared,
                "first_difference": self.comparison.agreement.parted_at,
                "gap_nats": self.comparison.agreement.gap_nats,
                "mean_logprob_difference_nats": self.comparison.mean_nats,
                "max_logprob_difference_nats": self.comparison.max_nats,
            }
        return document


def compare_answers(answer: Answer, reference: Answer) -> Comparison:
    """Token by token, up to the first difference."""
    agreement = agree(answer, reference)
    num_shared = len(reference.tokens) if agreement.parted_at is None else agreement.parted_at
    shared = zip(answer.tokens[:num_shared], answer.top, reference.top, strict=False)
    differences = [abs(ours[token] - theirs[token]) for token, ours, theirs in shared if token in ours.keys() & theirs]
    return Comparison(answer.prompt_tokens, agreement, num_shared, tuple(differences))


def make_prompts(max_characters: int) -> list[str]:
    """Texts of lengths from one character to that many, evenly spread on a logarithmic scale."""
    lengths = {round(max_characters ** (step / (NUM_PROMPTS - 1))) for step in range(NUM_PROMPTS)}
    return [text_of(length) for length in sorted(lengths)]


def read_prompts(file: Path) -> list[str]:
    """A prompt a line. Raises ``ConfigError`` where there is none."""
    prompts = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"{file}: expected a prompt in each line, got none")
    return prompts


def compare_endpoints(
    http: httpx.Client, endpoints: Sequence[Endpoint], reference: Endpoint, prompts: Sequence[str], output_len: int
) -> list[Outcome]:
    """Every prompt through the reference, then through the others. What fails is an outcome, not an exception."""

    def ask(endpoint: Endpoint, prompt: str) -> Answer:
        model = {"model": endpoint.model}
        try:
            return complete(http, endpoint.url, prompt, max_tokens=output_len, extra=model)
        except httpx.HTTPError as error:
            raise PeerError(f"{endpoint.url}: {error or type(error).__name__}") from error

    outcomes = []
    for number, prompt in enumerate(prompts, 1):
        try:
            expected = ask(reference, prompt)
        except PeerError as error:
            outcomes += [Outcome(endpoint.name, number, None, str(error)) for endpoint in endpoints]
            continue
        for endpoint in endpoints:
            try:
                comparison = compare_answers(ask(endpoint, prompt), expected)
                outcomes.append(Outcome(endpoint.name, number, comparison))
            except PeerError as error:
                outcomes.append(Outcome(endpoint.name, number, None, str(error)))
    return outcomes


def make_table(outcomes: Sequence[Outcome], reference: str, max_gap_nats: float) -> Table:
    """A line per prompt and deployment."""
    table = Table(title=f"Answers against {reference}'s; log-probabilities over the tokens that both gave")
    table.add_column("deployment", overflow="fold")
    for heading in ("prompt\ntokens", "shared\ntokens"):
        table.add_column(heading, justify="right")
    table.add_column("answer")
    for heading in ("mean\nnats apart", "max\nnats apart"):
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        compared = outcome.comparison
        if compared is None:
            table.add_row(outcome.deployment, "-", "-", "[red]failed[/red]", "-", "-")
            continue
        said = say_agreement(compared.agreement, max_gap_nats)
        apart = ("-" if nats is None else f"{nats:.4f}" for nats in (compared.mean_nats, compared.max_nats))
        table.add_row(outcome.deployment, f"{compared.prompt_tokens:,}", str(compared.num_shared), said, *apart)
    return table


def say_agreement(agreement: Agreement, max_gap_nats: float) -> str:
    """In words; positions count from 1."""
    if agreement.parted_at is None:
        return "same"
    gap = "not in its top" if agreement.gap_nats is None else f"{agreement.gap_nats:.3f} nats"
    if agreement.within(max_gap_nats):
        return f"same, tie at {agreement.parted_at + 1} ({gap})"
    return f"[red]differs at {agreement.parted_at + 1} ({gap})[/red]"
