"""Makes the tiny encoders of this folder and what they compute, with numpy in float64.

    pip install numpy safetensors tokenizers
    python make_reference.py

Written from the papers (BERT, arXiv 1810.04805; ModernBERT, arXiv 2412.13663) and the layout of
transformers' files; shares nothing with the Rust code. Weights are random, from a fixed seed.
"""

import json
import math
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

HERE = Path(__file__).parent
ERF = np.vectorize(math.erf)
GELU = {
    "gelu": lambda x: 0.5 * x * (1 + ERF(x / math.sqrt(2))),
    "gelu_new": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}
TEXTS = [
    "The cat sat on the mat.",
    "",
    "A dog, a bird and a cat!",
    "Unhappiest dogs sing; BIRDS played on mats",
    "café naïve 東京",
    "the unknown zebra [SEP] sings",
    "a cat and a dog and a bird and a cat and a dog and a bird and a cat",
]


def words():
    """A WordPiece vocabulary of a few words."""
    whole = "the cat dog bird mat sat on and a un happy sing play cafe naive 東 unknown"
    pieces = "##s ##ed ##ing ##iest ##happ ##known ##er"
    letters = [chr(c) for c in range(ord("b"), ord("y"))]
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *".,;!", *whole.split(), *pieces.split(), *letters]


def tokenizer():
    vocab = {word: i for i, word in enumerate(words())}
    tok = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tok.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tok.normalizer = normalizers.BertNormalizer(lowercase=True)
    tok.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tok.decoder = decoders.WordPiece()
    marks = [("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])]
    tok.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=marks
    )
    return tok


def layer_norm(x, gain, bias, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * gain + bias


def attend(q, k, v, sees):
    """`[n, heads, dim]` each; `sees[i, j]` is whether token i sees token j."""
    scores = np.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
    scores = np.where(sees, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hij,jhd->ihd", weights, v).reshape(q.shape[0], -1)


def bert(config, weights, ids):
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
    eps, heads, n = config["layer_norm_eps"], config["num_attention_heads"], len(ids)

    def norm(x, name):
        return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][:n] + w["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        q, k, v = (linear(x, f"{at}.attention.self.{s}").reshape(n, heads, -1) for s in ("query", "key", "value"))
        attended = attend(q, k, v, np.ones((n, n), bool))
        x = norm(x + linear(attended, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm")
        inner = GELU[config["hidden_act"]](linear(x, f"{at}.intermediate.dense"))
        x = norm(x + linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    return x


def rotate(x, theta):
    """Rotary embedding of halves, `[n, heads, dim]`."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[0])[:, None] / theta ** (np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def modern_bert(config, weights, ids):
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items()}
    eps, heads, n = config["norm_eps"], config["num_attention_heads"], len(ids)

    def norm(x, name):
        return layer_norm(x, w[f"{name}.weight"], 0.0, eps)

    x = norm(w["embeddings.tok_embeddings.weight"][ids], "embeddings.norm")
    distance = np.abs(np.arange(n)[:, None] - np.arange(n)[None])
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}"
        full = layer % config["global_attn_every_n_layers"] == 0
        theta = config["global_rope_theta" if full else "local_rope_theta"]
        sees = np.ones((n, n), bool) if full else distance <= config["local_attention"] // 2
        normed = norm(x, f"{at}.attn_norm") if layer > 0 else x
        qkv = (normed @ w[f"{at}.attn.Wqkv.weight"].T).reshape(n, 3, heads, -1)
        q, k, v = rotate(qkv[:, 0], theta), rotate(qkv[:, 1], theta), qkv[:, 2]
        x = x + attend(q, k, v, sees) @ w[f"{at}.attn.Wo.weight"].T
        given, gate = np.split(norm(x, f"{at}.mlp_norm") @ w[f"{at}.mlp.Wi.weight"].T, 2, -1)
        x = x + (GELU[config["hidden_activation"]](given) * gate) @ w[f"{at}.mlp.Wo.weight"].T
    return norm(x, "final_norm")


def random_weights(shapes, seed):
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes.items():
        values = random.standard_normal(shape)
        if "norm" in name.lower():
            values = (1.0 if name.endswith("weight") else 0.0) + 0.2 * values
        elif len(shape) == 2 and "embeddings" not in name:
            values *= 1.6 / math.sqrt(shape[1])
        weights[name] = values.astype(np.float32)
    return weights


def bert_shapes(config):
    dim, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], dim),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], dim),
        "embeddings.token_type_embeddings.weight": (config["type_vocab_size"], dim),
        "embeddings.LayerNorm.weight": (dim,),
        "embeddings.LayerNorm.bias": (dim,),
        "pooler.dense.weight": (dim, dim),
        "pooler.dense.bias": (dim,),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        linears = {f"attention.self.{s}": (dim, dim) for s in ("query", "key", "value")}
        linears |= {"attention.output.dense": (dim, dim)}
        linears |= {"intermediate.dense": (inner, dim), "output.dense": (dim, inner)}
        for name, shape in linears.items():
            shapes |= {f"{at}.{name}.weight": shape, f"{at}.{name}.bias": shape[:1]}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{at}.{name}.weight": (dim,), f"{at}.{name}.bias": (dim,)}
    return shapes


def modern_shapes(config):
    dim, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {
        "embeddings.tok_embeddings.weight": (config["vocab_size"], dim),
        "embeddings.norm.weight": (dim,),
        "final_norm.weight": (dim,),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"layers.{layer}"
        if layer > 0:
            shapes[f"{at}.attn_norm.weight"] = (dim,)
        shapes[f"{at}.attn.Wqkv.weight"] = (3 * dim, dim)
        shapes[f"{at}.attn.Wo.weight"] = (dim, dim)
        shapes[f"{at}.mlp_norm.weight"] = (dim,)
        shapes[f"{at}.mlp.Wi.weight"] = (2 * inner, dim)
        shapes[f"{at}.mlp.Wo.weight"] = (dim, inner)
    return shapes


def unit(vector):
    return (vector / np.linalg.norm(vector)).tolist()


def write(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf8")


def make_bert():
    folder = HERE / "bert_tiny"
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": 32,
        "intermediate_size": 64,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "position_embedding_type": "absolute",
        "type_vocab_size": 2,
        "vocab_size": len(words()),
    }
    weights = random_weights(bert_shapes(config), seed=11)
    write(folder / "config.json", config)
    write(folder / "tokenizer_config.json", {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"})
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    write(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(kinds.items())
        ],
    )
    write(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": 32,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
    )
    write(folder / "sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": False})
    tok = tokenizer()
    tok.save(str(folder / "tokenizer.json"), pretty=False)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    ids = [tok.encode(text).ids for text in TEXTS]
    long = "a bird " * 20
    tok.enable_truncation(24)
    rows = [bert(config, weights, i) for i in ids]
    tanh = bert(config | {"hidden_act": "gelu_new"}, weights, ids[0])
    reference = {
        "texts": TEXTS,
        "ids": ids,
        "rows_0": rows[0].tolist(),
        "mean": [unit(r.mean(0)) for r in rows],
        "cls": [unit(r[0]) for r in rows],
        "last": [unit(r[-1]) for r in rows],
        "mean_as_it_is_0": rows[0].mean(0).tolist(),
        "mean_gelu_new_0": unit(tanh.mean(0)),
        "long_text": long,
        "mean_of_long_text_cut": unit(bert(config, weights, tok.encode(long).ids).mean(0)),
    }
    write_short(HERE / "bert_tiny.reference.json", reference)


def make_modern():
    folder = HERE / "modern_bert_tiny"
    config = {
        "architectures": ["ModernBertModel"],
        "model_type": "modernbert",
        "attention_bias": False,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "hidden_activation": "gelu",
        "hidden_size": 32,
        "intermediate_size": 48,
        "local_attention": 8,
        "local_rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "mlp_bias": False,
        "norm_bias": False,
        "norm_eps": 1e-5,
        "num_attention_heads": 2,
        "num_hidden_layers": 4,
        "vocab_size": 64,
    }
    weights = random_weights(modern_shapes(config), seed=12)
    write(folder / "config.json", config)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    random = np.random.default_rng(13)
    ids = [random.integers(0, 64, n).tolist() for n in (30, 1, 7, 50, 5)]
    rows = [modern_bert(config, weights, i) for i in ids]
    reference = {
        "ids": ids,
        "rows_0": rows[0].tolist(),
        "mean": [unit(r.mean(0)) for r in rows],
        "cls": [unit(r[0]) for r in rows],
        "last": [unit(r[-1]) for r in rows],
    }
    write_short(HERE / "modern_bert_tiny.reference.json", reference)


def write_short(path, reference):
    """JSON with numbers of nine digits: more than float32 holds."""
    short = json.loads(json.dumps(reference), parse_float=lambda text: float(f"{float(text):.9g}"))
    path.write_text(json.dumps(short, ensure_ascii=False) + "\n", encoding="utf8")


make_bert()
make_modern()
