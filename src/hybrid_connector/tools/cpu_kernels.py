"""What do recurrent layers need that vLLM 0.32's CPU build lacks or gets wrong?

`supply_missing_kernels` changes vLLM in this process, before any fork:

1. gated delta nets: a prompt of one token;
2. Mamba1 and short convolutions: weights of four taps;
3. Mamba1: the scan of a prompt, the decode step, contiguous rows;
4. Mamba2 with prefix caching: the state at a block's end in the middle of a prompt;
5. latent attention and LFM2: the rotation of queries that are not flattened;
6. pipeline parallelism: the buffer for the previous stage's output.

Plain torch throughout: tiny models are small.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch

_LAYERS = "vllm.model_executor.layers.mamba"


def supply_missing_kernels() -> None:
    """Repair and add, each as narrowly as vLLM's own call goes."""
    _serve_single_tokens()
    _unpack_convolutions()
    _supply_mamba1()
    _supply_mamba2_checkpoints()
    _rotate_heads()
    _supply_stage_buffers()


def _serve_single_tokens() -> None:
    """Let a prompt of one token pass where a convolution state is kept as (taps, channels).

    vLLM 0.32's kernel takes a lone first token for a matrix that is not transposed, and the engine dies of it. So a
    second token is added, of a request whose state lies in the null block, which nobody reads.
    """
    module: Any = importlib.import_module(f"{_LAYERS}.ops.cpu.gdn_attention")
    convolve = module._causal_conv1d_fwd_cpu

    def convolve_two(*, x: Any, query_start_loc: Any, cache_indices: Any, has_initial_state: Any, **rest: Any) -> Any:
        lone = x.shape[1] == 1
        if lone:
            x = torch.cat([x, torch.zeros_like(x)], dim=1).t().contiguous().t()
            query_start_loc = torch.cat([query_start_loc, query_start_loc[-1:] + 1])
            cache_indices = torch.cat([cache_indices, torch.zeros_like(cache_indices[:1])])
            has_initial_state = torch.cat([has_initial_state, torch.zeros_like(has_initial_state[:1])])
        out = convolve(
            x=x,
            query_start_loc=query_start_loc,
            cache_indices=cache_indices,
            has_initial_state=has_initial_state,
            **rest,
        )
        return out[:, :1] if lone else out

    module._causal_conv1d_fwd_cpu = convolve_two


def _unpack_convolutions() -> None:
    """Let Mamba1 and short convolutions of four taps run.

    vLLM packs the bf16 weights of every convolution of four taps for the delta nets' kernel at load time, and the
    layers that do not use that kernel die of the packed shape at their first token.
    """
    for module, class_name, attribute, method in (
        ("mamba_mixer", "MambaMixer", "conv1d", "forward_impl"),
        ("short_conv", "ShortConv", "conv", "forward_native"),
    ):
        layer_class = getattr(importlib.import_module(f"{_LAYERS}.{module}"), class_name)
        setattr(layer_class, method, _unpacking(attribute, getattr(layer_class, method)))


def _unpacking(attribute: str, forward: Callable[..., None]) -> Callable[..., None]:
    def forward_unpacked(layer: Any, *args: Any, **kwargs: Any) -> None:
        convolution = getattr(layer, attribute)
        plain = convolution.__dict__.pop("_cpu_unpacked_conv_weight", None)
        if plain is not None:
            convolution.weight.data = plain.unsqueeze(1)
        forward(layer, *args, **kwargs)

    return forward_unpacked


def _supply_mamba1() -> None:
    """Supply the scan of a prompt, and a decode step for channels that differ.

    The CPU's matrix product also wants contiguous rows, which the layer makes when it believes in LoRA.
    """
    operators: Any = importlib.import_module("vllm._custom_ops")
    mixer: Any = importlib.import_module(f"{_LAYERS}.mamba_mixer").MambaMixer
    step, forward = operators.selective_state_update_cpu, mixer.forward_impl

    def step_headless(state: Any, *tensors: Any) -> None:
        (_step_channels if state.dim() == 3 else step)(state, *tensors)

    def forward_contiguous(layer: Any, *args: Any, **kwargs: Any) -> None:
        layer.is_lora_enabled = True
        forward(layer, *args, **kwargs)

    operators.selective_scan_fwd = _scan_prompts
    operators.selective_state_update_cpu = step_headless
    mixer.forward_impl = forward_contiguous


def _step_channels(
    states: Any, x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, z: Any, dt_bias: Any, softplus: bool, *rest: Any
) -> None:
    """One token of each request: `x`, `dt`, `z` (requests, channels), `b`, `c` (requests, state); see `_scan_prompts`.

    vLLM's own step takes the channels of a head for alike, as Mamba2's are, and is wrong without an error here.
    """
    read, write, _, out, *_ = rest
    dt = dt.float() + dt_bias
    dt = torch.nn.functional.softplus(dt) if softplus else dt
    state = torch.exp(dt[:, :, None] * a) * states[read.flatten()].float()
    state += (dt * x.float())[:, :, None] * b.float()[:, None, :]
    states[write.flatten()] = state.to(states.dtype)
    y = (state @ c.float()[:, :, None]).squeeze(-1) + d.float() * x.float()
    out.copy_(y * torch.nn.functional.silu(z.float()))


def _scan_prompts(
    u: Any, delta: Any, a: Any, b: Any, c: Any, d: Any, z: Any, delta_bias: Any, softplus: bool, starts: Any, *rest: Any
) -> None:
    """`h = exp(dt * a) * h + dt * b * u`, `y = (c . h + d * u) * silu(z)`, token by token; `y` replaces `z`.

    Shapes: `u`, `delta`, `z` (channels, tokens); `a` (channels, state); `b`, `c` (1, state, tokens). Request i owns
    the tokens from `starts[i]` to `starts[i + 1]` and the state `states[slots[i]]`.
    """
    slots, has_state, states, *_ = rest
    dt = delta.float() + delta_bias[:, None]
    dt = torch.nn.functional.softplus(dt) if softplus else dt
    decay = torch.exp(dt.t()[:, :, None] * a)
    written = (dt * u.float()).t()[:, :, None] * b[0].float().t()[:, None, :]
    read = torch.empty_like(dt)
    for i, slot in enumerate(slots.tolist()):
        state = states[slot].float() if has_state is not None and has_state[i] else torch.zeros_like(a)
        for token in range(int(starts[i]), int(starts[i + 1])):
            state = decay[token] * state + written[token]
            read[:, token] = state @ c[0, :, token].float()
        states[slot] = state.to(states.dtype)
    z.copy_((read + d[:, None] * u.float()) * torch.nn.functional.silu(z.float()))


def _supply_mamba2_checkpoints() -> None:
    """With prefix caching, a prompt's scan also leaves its state at the end of the last full block.

    The CPU's scan returns each request's last state where each chunk's is asked for, and the copy is a Triton kernel.
    """
    scans: Any = importlib.import_module(f"{_LAYERS}.ops.ssd_combined")
    scan = scans._mamba_chunk_scan_combined_fwd

    def scan_chunks(
        x: Any,
        dt: Any,
        a: Any,
        b: Any,
        c: Any,
        chunk_size: int,
        out: Any,
        *,
        initial_states: Any = None,
        return_intermediate_states: bool = False,
        cu_seqlens: Any = None,
        cu_chunk_seqlens: Any = None,
        last_chunk_indices: Any = None,
        **rest: Any,
    ) -> Any:
        if not return_intermediate_states:
            return scan(x, dt, a, b, c, chunk_size, out, initial_states=initial_states, cu_seqlens=cu_seqlens, **rest)
        states: list[torch.Tensor] = []
        lasts = iter(last_chunk_indices.tolist())
        rows = iter([None] * cu_chunk_seqlens.numel() if initial_states is None else initial_states.split(1))
        state, last = next(rows), next(lasts)
        for chunk, (begin, end) in enumerate(pairwise(cu_chunk_seqlens.tolist())):
            x_, dt_, b_, c_, out_ = (t[begin:end] for t in (x, dt, b, c, out))
            bounds = torch.tensor([0, end - begin], dtype=torch.int32)
            state = scan(x_, dt_, a, b_, c_, chunk_size, out_, initial_states=state, cu_seqlens=bounds, **rest)
            states.append(state)
            if chunk == last:  # the next chunk begins another request
                state, last = next(rows, None), next(lasts, None)
        return torch.cat(states)

    scans._mamba_chunk_scan_combined_fwd = scan_chunks
    mixers: Any = importlib.import_module(f"{_LAYERS}.mamba_mixer2")
    mixers.store_prefill_checkpoint = _store_checkpoints


def _store_checkpoints(
    checkpoint: Any,
    chunks: Any,
    x: Any,
    conv_states: Any,
    chunk_states: Any,
    ssm_states: Any,
    starts: Any,
    *,
    state_len: int,
) -> None:
    """Request i's checkpoint lies `offsets[i]` tokens behind its first one; 0 means it has none."""
    for i, offset in enumerate(checkpoint.offsets):
        if offset:
            slot, end = checkpoint.state_indices[i], int(starts[i]) + offset
            conv_states[slot, :, :state_len] = x[:, end - state_len : end]
            ssm_states[slot] = chunk_states[chunks[i]]


def _rotate_heads() -> None:
    """The CPU's rotary kernel takes (tokens, heads, size) for (tokens, size), so positions come out of the batch."""
    rotary: Any = importlib.import_module("vllm.model_executor.layers.rotary_embedding.base").RotaryEmbedding
    rotate_flat = rotary.forward_cpu

    def rotate(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        return (self.forward_native if query.dim() == 3 else partial(rotate_flat, self))(positions, query, key)

    rotary.forward_cpu = rotate


def _supply_stage_buffers() -> None:
    """vLLM makes the buffer in a profiling run, which does not happen with an explicit cache size and no compiler."""
    runner: Any = importlib.import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    gather = runner.sync_and_gather_intermediate_tensors

    def gather_into_buffer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *args, **kwargs)

    runner.sync_and_gather_intermediate_tensors = gather_into_buffer
