"""The cached contrastive step against sentence-transformers, GradCache and plain backpropagation.

All programs share one model object, the tokens, the precision (bf16 autocast where the processor has it) and
the threads, and compute the same loss: InfoNCE with query–query negatives, no margin, no quantisation.
`agree` proves it in float32.

sentence-transformers and GradCache get each column padded to its longest text, as their collators do it. What
is counted are true tokens, padding excluded.
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np
import torch
from datasets import Dataset
from measure import Case, Step
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config, Qwen3Model

import tiny
from closeness import assert_close
from unmask.config import load_preset
from unmask.data.sources import open_corpus
from unmask.data.tokens import train_tokenizer
from unmask.losses import pair_loss
from unmask.models.backbone import has_bf16
from unmask.models.encoding import TokenSequence, mean_pool
from unmask.store import artifacts_root
from unmask.training.cache import cached_backward

PRESET = load_preset("scratch")
BF16 = has_bf16("cpu")  # where not, all is measured in float32
TEMPERATURE = 0.05  # at 0.02 the loss of an untrained model is so large that relative differences hide
PAIRS, EQUAL_LENGTH, MIXED_LENGTH = 128, 64, 256  # 256: the paper's texts
ATTENTION = "sdpa", "eager"  # on a CPU in bf16 now one is faster, now the other; each takes its best
plain_loss = partial(pair_loss, temperature=TEMPERATURE, margin=math.inf)
PEERS = artifacts_root() / "benchmarks" / "peers"  # packages that only `make bench` needs
Columns = tuple[list[np.ndarray], list[np.ndarray]]  # token ids of the queries, of the documents
Programs = dict[str, dict[str, Step]]  # with their variants


def bidirectional(layers: int, vocabulary=PRESET.data.vocab_size, shape=PRESET.backbone) -> Qwen3Model:
    """The Transformer of a preset, preset scratch's by default, with so many layers, untrained."""
    torch.manual_seed(0)
    return Qwen3Model(Qwen3Config(**tiny.sizes(shape, layers, vocabulary), is_causal=False)).train()


def equal_lengths(pairs: int) -> Columns:
    """Random tokens: texts of one length, so nothing is padded by anybody."""
    ids = np.random.default_rng(0).integers(4, PRESET.data.vocab_size, (2, pairs, EQUAL_LENGTH), np.int32)
    return list(ids[0]), list(ids[1])


def docstrings() -> tuple[PreTrainedTokenizerBase, Dataset, np.ndarray]:
    """The English pairs of the training part of preset scratch's corpus, summary line and rest of a
    docstring: a tokenizer of theirs, the table that holds them, and their rows in random order."""
    corpus = open_corpus(PRESET.data)
    table = corpus.pairs("train")
    english = np.flatnonzero(np.asarray(table["group"]) == "english")
    order = np.random.default_rng(0).permutation(english)
    folder = artifacts_root() / "benchmarks" / f"tokenizer-{corpus.hash[:16]}"
    if not (folder / "tokenizer.json").is_file():
        texts = table.select(order)
        train_tokenizer([*texts["query"], *texts["document"]], PRESET.data.vocab_size, folder)
    return AutoTokenizer.from_pretrained(folder), table, order


def real_lengths(pairs: int, lengths: tuple[int, int] = (MIXED_LENGTH, MIXED_LENGTH)) -> Columns:
    """So many of the pairs of `docstrings`, as tokens."""
    tokenizer, table, order = docstrings()
    rows = table.select(np.resize(order, pairs))  # more pairs than there are: again from the start
    columns = zip((rows["query"], rows["document"]), lengths, strict=True)
    return tuple(tiny.tokenize(tokenizer, list(texts), length) for texts, length in columns)


def total(columns: Columns) -> int:
    """Tokens of all texts, padding excluded."""
    return sum(len(tokens) for column in columns for tokens in column)


def backward(loss: Tensor) -> Tensor:
    """Leaves the gradient in the parameters, as all steps do, and returns the loss."""
    loss.backward()
    return loss.detach()


def ours(model: nn.Module, columns: Columns, token_budget: int, keep_tokens: int = 0) -> Tensor:
    """Our step; like the others it leaves the gradient in the parameters and returns the loss."""
    items = [TokenSequence(tokens) for column in columns for tokens in column]
    options = {"token_budget": token_budget, "keep_tokens": keep_tokens}
    return cached_backward(model, items, lambda rows_RD: plain_loss(*rows_RD.chunk(2)), **options)


class Pooled(nn.Module):
    """Model and mean pooling with nothing around them: less overhead than the peers' own wrappers."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        read = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return mean_pool(read.last_hidden_state, attention_mask)


class Module(Pooled):
    """The same as a module of sentence-transformers."""

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return features | {"sentence_embedding": super().forward(**features)}


def padded(texts: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """One column as a collator makes it: padded on the right to the longest text."""
    tensors = [torch.from_numpy(tokens.astype(np.int64)) for tokens in texts]
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return {"input_ids": pad(tensors), "attention_mask": pad([torch.ones_like(t) for t in tensors])}


def sentence_transformers(model: nn.Module, columns: Columns, **sizes: int) -> Callable[[], Tensor]:
    """A step of CachedMultipleNegativesRankingLoss, with its sizes of mini-batches."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    options = {"scale": 1 / TEMPERATURE, "directions": ("query_to_doc", "query_to_query")}
    peer = SentenceTransformer(modules=[Module(model)], device="cpu")
    loss_of = CachedMultipleNegativesRankingLoss(peer, **options, **sizes)
    features = [padded(column) for column in columns]
    return lambda: backward(loss_of(features, labels=None))


def gradcache(model: nn.Module, columns: Columns, chunk: int) -> Callable[[], Tensor]:
    """A step of GradCache (Gao et al. 2021); raises ImportError where it is not installed."""
    sys.path.append(str(PEERS))
    import gradcache

    # Release 0.0.1 is packaged as `gradcache` and imports itself by its older name.
    sys.modules.setdefault("grad_cache", gradcache)
    from gradcache.grad_cache import GradCache

    encoder = Pooled(model)
    cache = GradCache([encoder, encoder], chunk, plain_loss)
    features = [padded(column) for column in columns]
    return lambda: cache(*features)


def uncached(model: nn.Module, columns: Columns) -> Callable[[], Tensor]:
    """Plain backpropagation: one forward pass per column, all activations kept."""
    encoder, features = Pooled(model), [padded(column) for column in columns]
    return lambda: backward(plain_loss(*(encoder(**column) for column in features)))


def attended(model: nn.Module, implementation: str, step: Step, bf16: bool = BF16) -> Tensor:
    """A step with one of transformers' ways to compute attention."""
    model.set_attn_implementation(implementation)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        return step()


def programs(model: nn.Module, columns: Columns, *, bf16: bool) -> tuple[Programs, dict[str, str]]:
    """Every program with the settings to try, and why a program is missing."""
    sizes, tokens = (16, 32, 64), (2048, 4096, 8192)
    everything = total(columns)
    budgets = product((1024, 2048, 4096), (0, everything // 4, everything // 2, everything))
    mine = {f"token_budget {n}, keep_tokens {k}": partial(ours, model, columns, n, k) for n, k in budgets}
    theirs = {f"mini_batch_size {n}": {"mini_batch_size": n} for n in sizes}
    for n in tokens:
        theirs[f"mini_batch_num_tokens {n}"] = {"mini_batch_size": 64, "mini_batch_num_tokens": n}
    theirs = {name: sentence_transformers(model, columns, **how) for name, how in theirs.items()}
    plain, missing = {"one pass per column": uncached(model, columns)}, {}
    found: Programs = {"unmask": mine, "sentence-transformers": theirs, "uncached": plain}
    try:
        found["GradCache"] = {f"chunk {n}": gradcache(model, columns, n) for n in sizes}
    except ImportError as error:
        missing["GradCache"] = f"{error}; install it with `make bench`"
    for program, steps in found.items():
        run, ways = partial(attended, model, bf16=bf16), product(steps.items(), ATTENTION)
        found[program] = {f"{name}, {how}": partial(run, how, step) for (name, step), how in ways}
    return found, missing


def agree(model: nn.Module, steps: Programs) -> None:
    """Raises AssertionError unless all programs give the same loss and the same gradient (in float32)."""
    expected = None
    for step in (step for variants in steps.values() for step in variants.values()):
        model.zero_grad()
        found = step().reshape(1), torch.cat([p.grad.flatten() for p in model.parameters()])
        expected = expected or found
        assert_close(found[0], expected[0], 1e-4)
        assert_close(found[1], expected[1], 1e-3)
    model.zero_grad()


def step_case(layers: int, columns_of: Callable[[int], Columns], lengths: str) -> Case:
    """All programs on one batch; whether they agree is checked on a few of its pairs."""
    model, columns = bidirectional(layers), columns_of(PAIRS)
    found, missing = programs(model, columns, bf16=BF16)
    setting = f"{layers} layers, {PRESET.backbone.hidden_size}-d, {PAIRS} pairs {lengths}"

    def check() -> None:
        agree(model, programs(model, (columns[0][:8], columns[1][:8]), bf16=False)[0])

    return Case(described(setting), "true tokens/s", total(columns), found, check, missing)


def scaling_case(pairs: int) -> Case:
    """Our step at preset scratch's lengths, budget and loss settings, on a global batch of so many pairs."""
    config, shape = PRESET.pair, PRESET.backbone
    model = bidirectional(shape.layers)
    columns = real_lengths(pairs, (config.query_length, config.document_length))
    budget = config.memory("cpu")["token_budget"]
    # Eager, as trainings in bf16 on a CPU.
    step = partial(attended, model, "eager", partial(ours, model, columns, budget))
    setting = f"{shape.layers} layers, {shape.hidden_size}-d, {pairs} docstring pairs of up to "
    setting += f"{config.query_length} and {config.document_length} tokens, token_budget {budget}"
    programs = {"unmask": {"": step}}
    return Case(described(setting), "true tokens/s", total(columns), programs, lambda: None)


def described(setting: str, precision: str = "bf16" if BF16 else "float32") -> str:
    return f"{setting}; {precision}, {torch.get_num_threads()} threads"


SIZES = (256, 1024, 4096, 16384)
EQUAL = f"of {EQUAL_LENGTH} tokens"
MIXED = f"of docstrings of up to {MIXED_LENGTH} tokens"
CASES = {f"scaling-{pairs}": partial(scaling_case, pairs) for pairs in SIZES}
for ending, layers in {"": PRESET.backbone.layers, "-4-layers": 4}.items():
    CASES[f"contrastive-equal{ending}"] = partial(step_case, layers, equal_lengths, EQUAL)
    CASES[f"contrastive-mixed{ending}"] = partial(step_case, layers, real_lengths, MIXED)
