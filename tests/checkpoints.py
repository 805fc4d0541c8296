"""Small random BERT checkpoints, written as the real ones are."""

import json
import math

import numpy as np
import tokenizers
from safetensors.numpy import save_file

LAYERS, HEADS, D, WIDE, POSITIONS = 3, 3, 12, 20, 9
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "all", "mimsy", "were", "the", "borogoves"]
TEXT = "all mimsy were the borogoves"


def random_tensors(seed=0, d=D):
    rng = np.random.default_rng(seed)

    def norm(name):
        return {f"{name}.weight": 1 + rng.normal(size=d) / 4, f"{name}.bias": rng.normal(size=d)}

    def linear(name, out, into):
        weight = rng.normal(size=(out, into)) / math.sqrt(into)
        return {f"{name}.weight": weight, f"{name}.bias": rng.normal(size=out) / 2}

    tensors = {
        "embeddings.word_embeddings.weight": rng.normal(size=(len(WORDS), d)),
        "embeddings.position_embeddings.weight": rng.normal(size=(POSITIONS, d)),
        "embeddings.token_type_embeddings.weight": rng.normal(size=(2, d)),
        **norm("embeddings.LayerNorm"),
    }
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}."
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            tensors |= linear(f"{at}attention.{name}", d, d)
        tensors |= linear(f"{at}intermediate.dense", WIDE, d) | linear(f"{at}output.dense", d, WIDE)
        tensors |= norm(f"{at}attention.output.LayerNorm") | norm(f"{at}output.LayerNorm")
    return tensors


def write(folder, tensors=None, **config):
    """A checkpoint in `folder`; `config` overrides its config.json."""
    folder.mkdir(exist_ok=True, parents=True)
    save_file(tensors or random_tensors(), folder / "model.safetensors")
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": D}
    sizes |= {"intermediate_size": WIDE, "layer_norm_eps": 1e-3, "hidden_act": "gelu"}
    (folder / "config.json").write_text(json.dumps(sizes | config))
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    # As published tokenizers do, ask for one short length: it must not reach the model.
    tokenizer.enable_padding(length=30)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
