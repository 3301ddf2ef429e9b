"""Does a block have the length that vLLM gave it where that was seen?"""

import pytest

from hybrid_connector.core.errors import UnsupportedError
from hybrid_connector.tools.models.blocks import BACKENDS, choose_block, choose_page

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("backend", "token_bytes", "state_bytes", "block"),
    [
        # 32 layers, 64 value heads of 128 by 128 in bfloat16, 2 KV heads of 256: seen on vLLM 0.33 with CUDA.
        ("FLASH_ATTN", 2 * KIB, 2 * MIB + (2 * 16 + 64) * 128 * 3 * 2, 1072),
        # 92 layers, 4 MiB + 120 KiB a layer: seen on vLLM 0.33 with CUDA.
        ("FLASH_ATTN", 2 * KIB, 4 * MIB + 120 * KIB, 2112),
        # The tiny hybrid model: seen on vLLM 0.32 with CPU blocks, whose step is 128 tokens.
        ("CPU_ATTN", 1024, 4 * 128 * 128 * 4 + (2 * 2 + 4) * 128 * 3 * 2, 384),
        ("FLASH_ATTN_MLA", 1152, 2 * MIB, 1920),  # a multiple of 128
        ("FLASH_ATTN", 2 * KIB, 0, 16),
        ("FLASHMLA", 1152, 0, 64),
        ("CUTLASS_MLA", 1152, 0, 128),
        ("CPU_ATTN", 1024, 0, 128),
        ("CPU_MLA", 1024, 0, 16),
    ],
)
def test_the_block_vllm_chooses(backend, token_bytes, state_bytes, block):
    assert choose_block(BACKENDS[backend], None, token_bytes=token_bytes, state_bytes=state_bytes) == block


@pytest.mark.parametrize(("wanted", "block"), [(16, 1072), (64, 1088), (1056, 2112), (4096, 4096)])
def test_a_chosen_block_is_the_step_it_grows_by(wanted, block):
    state_bytes = 2 * MIB + (2 * 16 + 64) * 128 * 3 * 2
    assert choose_block(BACKENDS["FLASH_ATTN"], wanted, token_bytes=2 * KIB, state_bytes=state_bytes) == block


def test_one_cpu_kernel_has_its_way():
    assert choose_block(BACKENDS["CPU_MLA"], 64, token_bytes=1152) == 16


@pytest.mark.parametrize(
    ("backend", "block", "page"),
    [("FLASH_ATTN", 1072, 1072), ("FLASHINFER", 1056, 32), ("FLASHINFER", 64, 64), ("FLASHMLA", 1920, 64)],
)
def test_kernels_split_blocks_they_cannot_take(backend, block, page):
    assert choose_page(BACKENDS[backend], block) == page


def test_a_block_that_no_kernel_takes_is_refused():
    with pytest.raises(UnsupportedError, match=r"blocks of 24 tokens: FLASH_ATTN takes multiples of 16"):
        choose_block(BACKENDS["FLASH_ATTN"], 24, token_bytes=2 * KIB)
    with pytest.raises(UnsupportedError, match="blocks of 40 tokens: FLASHINFER takes 16 or 32 or 64"):
        choose_block(BACKENDS["FLASHINFER"], 40, token_bytes=2 * KIB)
