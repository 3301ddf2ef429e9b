"""How many tokens does vLLM put in a block, and how many of them in a page of the attention kernel?

1. ``Backend``: which lengths an attention backend's kernels accept.
2. ``choose_block``: the block; a hybrid's grows until an attention page holds a recurrent state.
3. ``choose_page``: the kernel's part of a block.

The rules are vLLM 0.32's: ``Platform.update_block_size_for_backend`` and ``_align_hybrid_block_size``
(platforms/interface.py), the same for CPUs (platforms/cpu.py), ``select_common_block_size`` (v1/worker/utils.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hybrid_connector.core.errors import UnsupportedError

LATENT_ALIGNMENT_TOKENS = 128
"""A hybrid's block is a multiple of this where attention is MLA."""


@dataclass(frozen=True, slots=True)
class Backend:
    """An attention backend: its kernels take pages of ``multiple_of`` tokens and multiples, or of ``exactly`` these.

    ``default_tokens``: the block where nobody chose one and these kernels can split it. ``overrules``: vLLM takes that
    whatever was chosen.
    """

    name: str
    device: Literal["cpu", "cuda"]
    multiple_of: int | None = None
    exactly: tuple[int, ...] = ()
    is_latent: bool = False
    default_tokens: int = 16
    overrules: bool = False

    @property
    def smallest(self) -> int:
        """The shortest page its kernels take."""
        return self.multiple_of if self.multiple_of is not None else min(self.exactly)

    def can_split(self, block_tokens: int) -> bool:
        """Whether a block of that length consists of whole pages of some length."""
        lengths = self.exactly or (self.smallest,)
        return any(block_tokens % length == 0 for length in lengths)

    def takes(self, page_tokens: int) -> bool:
        """Whether its kernels take pages of exactly that length."""
        return page_tokens in self.exactly or (self.multiple_of is not None and page_tokens % self.multiple_of == 0)


BACKENDS: Mapping[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("FLASH_ATTN", "cuda", multiple_of=16),
        Backend("TRITON_ATTN", "cuda", multiple_of=16),
        Backend("FLASHINFER", "cuda", exactly=(16, 32, 64)),
        Backend("FLASH_ATTN_MLA", "cuda", multiple_of=16, is_latent=True),
        Backend("TRITON_MLA", "cuda", multiple_of=16, is_latent=True),
        Backend("FLASHMLA", "cuda", exactly=(64,), is_latent=True),
        Backend("FLASHINFER_MLA", "cuda", exactly=(32, 64), is_latent=True),
        Backend("CUTLASS_MLA", "cuda", exactly=(128,), is_latent=True),
        Backend("CPU_ATTN", "cpu", multiple_of=32, default_tokens=128),
        Backend("CPU_MLA", "cpu", exactly=(16,), is_latent=True, overrules=True),
        Backend("AMX_MLA", "cpu", multiple_of=32, is_latent=True, default_tokens=128),
    )
}
"""By vLLM's name."""


def choose_block(backend: Backend, wanted: int | None, *, token_bytes: int, state_bytes: int = 0) -> int:
    """Tokens in a block of a rank.

    ``wanted``: ``--block-size``. ``token_bytes``: of one token in one attention layer on the rank, K and V.
    ``state_bytes``: of one recurrent layer's state on the rank, the largest of them; 0 where there is none.
    Raises ``UnsupportedError`` where the backend cannot split the block.
    """
    if backend.overrules:
        wanted = None
    block = backend.default_tokens if wanted is None else wanted
    if wanted is None and not backend.can_split(block):
        block = backend.smallest
    if state_bytes:
        step = max(backend.smallest, block)
        if backend.is_latent:
            step = max(step, LATENT_ALIGNMENT_TOKENS)
        grown = step * -(-state_bytes // (step * token_bytes))
        grown = backend.smallest * -(-grown // backend.smallest)
        block = max(block, grown)
    if not backend.can_split(block):
        raise UnsupportedError(
            f"blocks of {block} tokens: {backend.name} takes "
            + (f"multiples of {backend.multiple_of}" if backend.multiple_of else " or ".join(map(str, backend.exactly)))
        )
    return block


def choose_page(backend: Backend, block_tokens: int) -> int:
    """Tokens in a page: the whole block where the kernels take it, else the longest part that they take."""
    if backend.takes(block_tokens):
        return block_tokens
    lengths = [length for length in backend.exactly if block_tokens % length == 0]
    if not lengths:
        raise UnsupportedError(f"blocks of {block_tokens} tokens: {backend.name} has no page length that divides them")
    return max(lengths)
