"""Which layers of a model keep state, and what state, by its config.json?

1. ``Architecture``: where a model class's config says how its layers are mixed and how large their states are.
2. ``ARCHITECTURES``: the classes that are known, by the name in ``architectures``.
3. ``read_model``: a config and element types, as layers in vLLM's order and under vLLM's names.

A new class needs a line of the table, and a function only where its family's numbers have new names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hybrid_connector.core import families
from hybrid_connector.core.errors import ConfigError, UnsupportedError
from hybrid_connector.core.families import Attention, ElementType, Recurrent
from hybrid_connector.tools.models.config import Config

FULL, SLIDING, RECURRENT, BOTH, NONE = "full attention", "sliding window", "recurrent", "both", "none"
"""What a layer keeps."""


@dataclass(frozen=True, slots=True)
class Elements:
    """Element types of a model's caches, and ``num_speculative`` tokens, which lengthen conv states."""

    attention: ElementType
    conv: ElementType
    temporal: ElementType
    num_speculative: int = 0


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """One cache: vLLM's ``name``, the decoder layer that it belongs to, and its state of the whole model.

    ``window``: tokens of a sliding window. ``is_latent``: MLA.
    """

    name: str
    index: int
    state: Attention | Recurrent
    window: int | None = None
    is_latent: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """``num_layers`` decoder layers, those without state included: pipeline stages share out them."""

    architecture: str
    num_layers: int
    layers: tuple[ModelLayer, ...]

    @property
    def is_hybrid(self) -> bool:
        """Whether it has attention and recurrent layers."""
        return len({type(layer.state) for layer in self.layers}) > 1

    @property
    def overwrites_state(self) -> bool:
        """Whether P must stop a token early: the state after N tokens no longer contains the one after N - 1."""
        return any(isinstance(layer.state, Recurrent) or layer.window is not None for layer in self.layers)


State = Callable[[Config, Elements], Recurrent]


@dataclass(frozen=True, slots=True)
class Architecture:
    """Where to read one model class.

    ``mix``: what each layer keeps. ``attention`` and ``recurrent``: vLLM's names of the caches, with ``{i}`` for the
    layer and ``{n}`` for a number that no attention layer has. ``state``: of a recurrent layer. ``temporal``: the
    config's key for the temporal state's element type, and the type where neither it nor the engine's options say.
    ``is_latent``: MLA.
    """

    mix: Callable[[Config], Sequence[str]]
    attention: str = "model.layers.{i}.self_attn.attn"
    recurrent: str = ""
    state: State | None = None
    temporal: tuple[str, str] = ("", "")
    is_latent: bool = False


def read_model(config: Config, elements: Elements) -> Model:
    """The layers of the model. Raises ``UnsupportedError`` for a class that is not in the table."""
    architecture = find_architecture(config)
    mix = architecture.mix(config)
    layers: list[ModelLayer] = []
    for index, keeps in enumerate(mix):
        if keeps in (FULL, SLIDING, BOTH):
            layers.append(
                ModelLayer(
                    architecture.attention.format(i=index),
                    index,
                    _latent(config, elements) if architecture.is_latent else _attention(config, elements),
                    config.number("sliding_window") if keeps == SLIDING else None,
                    architecture.is_latent,
                )
            )
        if keeps in (RECURRENT, BOTH):
            assert architecture.state is not None
            name = architecture.recurrent.format(i=index, n=len(mix) + index)
            layers.append(ModelLayer(name, index, architecture.state(config, elements)))
    if not layers:
        raise ConfigError(f"{config.where}: none of its {len(mix)} layers keeps any state")
    return Model(config.architecture, len(mix), tuple(layers))


def find_architecture(config: Config) -> Architecture:
    """The table's line for the config. Raises ``UnsupportedError``, listing the table, where there is none."""
    found = ARCHITECTURES.get(config.architecture)
    if found is None:
        raise UnsupportedError(
            f"{config.where}: {config.architecture} is not among the classes that can be planned without vLLM: "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    return found


# Attention.


def _attention(config: Config, elements: Elements) -> Attention:
    heads = config.number("num_attention_heads")
    head_dim = config.get("head_dim", "attention_head_dim") or config.number("hidden_size") // heads
    num_kv_heads = config.number("num_key_value_heads", "num_kv_heads", default=heads)
    return Attention(num_kv_heads, 2 * int(head_dim), elements.attention)


def _latent(config: Config, elements: Elements) -> Attention:
    latent = config.number("kv_lora_rank") + config.number("qk_rope_head_dim")
    return families.latent_attention(latent=latent, element=elements.attention)


# How layers are mixed.

_NAMES = {
    "full_attention": FULL,
    "attention": FULL,
    "sliding_attention": SLIDING,
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
    "conv": RECURRENT,
    "mlp": NONE,
    "moe": NONE,
}


def _by_name(config: Config) -> tuple[str, ...]:
    """A list with a name per layer, or the numbers of the attention layers."""
    names = config.names("layer_types", "layers_block_type")
    if names is None:
        numbers = config.get("attn_layer_indices", "full_attn_idxs")
        if not isinstance(numbers, list):
            raise ConfigError(f"{config.where}: layer_types: expected a list with a name per layer, got none")
        return tuple(FULL if i in numbers else RECURRENT for i in range(config.number("num_hidden_layers")))
    unknown = sorted(set(names) - _NAMES.keys())
    if unknown:
        raise UnsupportedError(f"{config.where}: layers of type {', '.join(unknown)} are not known")
    return tuple(_NAMES[name] for name in names)


def _mixed_windows(config: Config) -> tuple[str, ...]:
    """Attention everywhere; windows as the list says, or everywhere where there is one and no list."""
    if config.names("layer_types") is not None:
        return _by_name(config)
    windowed = config.get("sliding_window") is not None and config.get("use_sliding_window") is not False
    return (SLIDING if windowed else FULL,) * config.number("num_hidden_layers")


def _windows_but_every_nth(config: Config) -> tuple[str, ...]:
    """The list, or full attention in one layer of so many."""
    if config.names("layer_types") is not None:
        return _by_name(config)
    step = config.number("sliding_window_pattern", default=6)
    return tuple(SLIDING if (i + 1) % step else FULL for i in range(config.number("num_hidden_layers")))


def _every_nth(config: Config) -> tuple[str, ...]:
    """The list, or one attention layer in so many."""
    if config.names("layer_types") is not None:
        return _by_name(config)
    step = config.number("full_attention_interval", default=4)
    return tuple(RECURRENT if (i + 1) % step else FULL for i in range(config.number("num_hidden_layers")))


def _periodic(config: Config) -> tuple[str, ...]:
    period, offset = config.number("attn_layer_period", default=8), config.number("attn_layer_offset", default=4)
    return tuple(FULL if i % period == offset else RECURRENT for i in range(config.number("num_hidden_layers")))


def _pattern(config: Config) -> tuple[str, ...]:
    """A letter per layer: M recurrent, * attention, anything else no state; or the list."""
    pattern = config.get("hybrid_override_pattern")
    if pattern is None:
        return _by_name(config)
    return tuple({"M": RECURRENT, "*": FULL}.get(letter, NONE) for letter in str(pattern))


def _numbered(config: Config) -> tuple[str, ...]:
    """The recurrent layers by number, from 1."""
    numbers = set(config.part("linear_attn_config").get("kda_layers") or ())
    return tuple(RECURRENT if i + 1 in numbers else FULL for i in range(config.number("num_hidden_layers")))


def _all(keeps: str) -> Callable[[Config], tuple[str, ...]]:
    return lambda config: (keeps,) * config.number("num_hidden_layers")


# Recurrent states.


def _delta_net(config: Config, elements: Elements) -> Recurrent:
    return families.delta_net(
        num_key_heads=config.number("linear_num_key_heads"),
        num_value_heads=config.number("linear_num_value_heads"),
        key_dim=config.number("linear_key_head_dim"),
        value_dim=config.number("linear_value_head_dim"),
        num_taps=config.number("linear_conv_kernel_dim") - 1 + elements.num_speculative,
        conv_element=elements.conv,
        temporal_element=elements.temporal,
    )


def _kda(config: Config, elements: Elements) -> Recurrent:
    part = config.part("linear_attn_config")
    return families.kda(
        num_heads=part.number("num_heads"),
        head_dim=part.number("head_dim"),
        num_taps=part.number("short_conv_kernel_size") - 1 + elements.num_speculative,
        conv_element=elements.conv,
        temporal_element=elements.temporal,
    )


def _mamba2(heads: str, head_dim: str, groups: str, state: str, taps: str) -> State:
    """Mamba2 under these names; a head dimension of "auto" is what the inner size leaves for each head."""

    def read(config: Config, elements: Elements) -> Recurrent:
        num_heads = config.number(heads)
        dim = config.get(head_dim)
        if dim is None or dim == "auto":
            expanded = config.number("mamba_expand", "expand", default=2) * config.number("hidden_size")
            dim = config.number("mamba_d_ssm", default=expanded) // num_heads
        return families.mamba2(
            num_heads=num_heads,
            head_dim=int(dim),
            num_groups=config.number(groups),
            state_dim=config.number(state),
            num_taps=config.number(taps) - 1 + elements.num_speculative,
            conv_element=elements.conv,
            temporal_element=elements.temporal,
        )

    return read


def _mamba1(state: str, taps: str, *inner: str) -> State:
    """Mamba1 under these names; as many channels as ``inner`` says, or as the hidden size expands to."""

    def read(config: Config, elements: Elements) -> Recurrent:
        expanded = config.number("mamba_expand", "expand", default=2) * config.number("hidden_size")
        return families.mamba1(
            num_channels=config.number(*inner, default=expanded),
            state_dim=config.number(state),
            num_taps=config.number(taps) - 1,
            conv_element=elements.conv,
            temporal_element=elements.temporal,
        )

    return read


def _short_convolution(config: Config, elements: Elements) -> Recurrent:
    return families.short_convolution(
        num_channels=config.number("conv_dim", "hidden_size"),
        num_taps=config.number("conv_L_cache") - 1 + elements.num_speculative,
        element=elements.conv,
    )


_MAMBA2 = _mamba2("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_MAMBA1_ALONE = _mamba1("state_size", "conv_kernel", "intermediate_size")
_QWEN3_5 = Architecture(
    _every_nth, recurrent="model.layers.{i}.linear_attn", state=_delta_net, temporal=("mamba_ssm_dtype", "")
)
_QWEN3_5_IN_VISION = Architecture(
    _every_nth,
    attention="language_model.model.layers.{i}.self_attn.attn",
    recurrent="language_model.model.layers.{i}.linear_attn",
    state=_delta_net,
    temporal=("mamba_ssm_dtype", ""),
)
_PLAIN = Architecture(_mixed_windows)
_LATENT = Architecture(_all(FULL), is_latent=True)

ARCHITECTURES: Mapping[str, Architecture] = {
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5,
    "Qwen3_5ForConditionalGeneration": _QWEN3_5_IN_VISION,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5_IN_VISION,
    "Qwen3NextForCausalLM": Architecture(_every_nth, recurrent="model.layers.{i}.linear_attn", state=_delta_net),
    "KimiLinearForCausalLM": Architecture(
        _numbered,
        attention="model.layers.{i}.self_attn",
        recurrent="model.layers.{i}.self_attn",
        state=_kda,
        temporal=("", "float32"),
        is_latent=True,
    ),
    "GraniteMoeHybridForCausalLM": Architecture(_by_name, recurrent="model.layers.{i}.mixer", state=_MAMBA2),
    "BambaForCausalLM": Architecture(_by_name, recurrent="model.layers.{i}.mixer", state=_MAMBA2),
    "FalconH1ForCausalLM": Architecture(
        _all(BOTH), attention="model.layers.{i}.attn", recurrent="model.{n}.mixer", state=_MAMBA2
    ),
    "NemotronHForCausalLM": Architecture(
        _pattern,
        attention="model.layers.{i}.mixer.attn",
        recurrent="model.layers.{i}.mixer",
        state=_mamba2("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
        temporal=("mamba_ssm_cache_dtype", "float32"),
    ),
    "Mamba2ForCausalLM": Architecture(
        _all(RECURRENT),
        recurrent="backbone.layers.{i}.mixer",
        state=_mamba2("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel"),
    ),
    "JambaForCausalLM": Architecture(
        _periodic,
        attention="model.layers.{i}.attn",
        recurrent="model.layers.{i}.mixer",
        state=_mamba1("mamba_d_state", "mamba_d_conv"),
    ),
    "MambaForCausalLM": Architecture(_all(RECURRENT), recurrent="backbone.layers.{i}.mixer", state=_MAMBA1_ALONE),
    "FalconMambaForCausalLM": Architecture(_all(RECURRENT), recurrent="backbone.layers.{i}.mixer", state=_MAMBA1_ALONE),
    "Lfm2ForCausalLM": Architecture(_by_name, recurrent="model.layers.{i}.short_conv", state=_short_convolution),
    "Lfm2MoeForCausalLM": Architecture(_by_name, recurrent="model.layers.{i}.short_conv", state=_short_convolution),
    "LlamaForCausalLM": _PLAIN,
    "MistralForCausalLM": _PLAIN,
    "Qwen2ForCausalLM": _PLAIN,
    "Qwen3ForCausalLM": _PLAIN,
    "Qwen3MoeForCausalLM": _PLAIN,
    "Gemma3ForCausalLM": Architecture(_windows_but_every_nth),
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
}
"""By the class's name in ``config.json``."""
