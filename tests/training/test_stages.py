from collections import Counter
from dataclasses import fields, is_dataclass, replace
from itertools import chain
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_stages
import torch
from tiny_stages import assert_same, backpropagated, step
from torch.nn.utils.rnn import pad_sequence

from unmask import losses
from unmask.config import load_preset
from unmask.data.tokens import TokenSequence
from unmask.models.encoding import encode_rows
from unmask.models.quantize import int8
from unmask.training import LateInteraction
from unmask.training.contrastive import cosine_ramp
from unmask.training.pretraining import fading_mask, noise


def plain(value):
    """A batch as nested lists, to compare."""
    if is_dataclass(value):
        return [plain(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.tolist()
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", tiny_stages.STAGES)
def test_a_batch_is_a_function_of_seed_and_step(name):
    one, two = (tiny_stages.stage(name) for _ in range(2))
    forward = [plain(one.batch(step)) for step in range(8)]
    assert forward == [plain(two.batch(step)) for step in reversed(range(8))][::-1]
    assert len({str(batch) for batch in forward}) == 8
    assert plain(tiny_stages.stage(name, seed=6).batch(0)) != forward[0]


@pytest.mark.parametrize("name", tiny_stages.STAGES)
def test_budgets_change_memory_not_the_gradient(name):
    """All at once; in micro-batches, of which none, some or all activations are kept."""
    budgets = [{"token_budget": 10**6}, {"token_budget": 32}]
    if hasattr(tiny_stages.config(name), "keep_tokens"):
        budgets = [budget | {"keep_tokens": kept} for budget in budgets for kept in (1, 60, 10**6)]
    stages = [tiny_stages.stage(name, **budget) for budget in budgets]
    expected, *others = [step(stage, tiny_stages.model(name), stage.batch(3)) for stage in stages]
    for found in others:
        assert_same(found, expected)


def loss_of(model, batch, attention_mask):
    noisy = batch.tokens_BL.masked_fill(batch.masked_BL, tiny_stages.MASK_ID)
    hidden = model.model(noisy, attention_mask=attention_mask).last_hidden_state
    return losses.diffusion_loss(hidden, model.lm_head.weight, *batch[:4])


def test_pretraining_stages_compute_the_loss_of_the_whole_batch():
    stage, model = tiny_stages.stage("diffusion", cut_fraction=0.5, batch=8), tiny_stages.model("diffusion")
    batch = stage.batch(0)
    assert not batch.valid_BL.all()
    loss = loss_of(model, batch, batch.valid_BL.long())
    assert_same(step(stage, model, batch), backpropagated(loss, model))

    stage, model = tiny_stages.stage("ar"), tiny_stages.model("ar")
    tokens = stage.batch(0)
    loss = losses.next_token_loss(model.model(tokens).last_hidden_state, model.lm_head.weight, tokens)
    assert_same(step(stage, model, tokens), backpropagated(loss, model))


def test_the_causal_mask_fades_over_a_share_of_the_steps():
    """At its start the model sees what a causal one sees; in between also later tokens, drawn anew each step;
    then all."""
    stage = tiny_stages.stage("diffusion", cut_fraction=0.5, batch=8, steps=10, anneal=0.5)
    seen = [stage.batch(step).seen_LL for step in range(10)]
    assert seen[0].equal(torch.ones(16, 16).bool().tril()) and seen[5:] == [None] * 5
    assert all((mask | seen[0]).equal(mask) for mask in seen[:5])
    wide = fading_mask(400, 0.3, np.random.default_rng(0))[~np.tri(400, dtype=bool)]
    assert wide.mean() == pytest.approx(0.3, abs=0.01)

    model = tiny_stages.model("diffusion")
    for number, sees in ((0, "causal"), (3, "some of both sides")):
        batch = stage.batch(number)
        assert not batch.valid_BL.all()
        mask = batch.seen_LL[None, None] & batch.valid_BL[:, None, None]
        model.config.is_causal = sees == "causal"
        loss = loss_of(model, batch, batch.valid_BL.long() if model.config.is_causal else mask)
        model.config.is_causal = False
        assert_same(step(stage, model, batch), backpropagated(loss, model))


def forward_process(count=2000, length=64, **changes):
    settings = tiny_stages.config("diffusion", **changes)
    tokens = np.random.default_rng(1).integers(4, 300, (count, length)).astype(np.int32)
    return tokens, noise(tokens, settings, np.random.default_rng(2))


def test_every_token_is_masked_with_probability_t():
    _, noised = forward_process(cut_fraction=0.0, t_min=0.1)
    t, length = noised.divisor_B.double(), noised.tokens_BL.shape[1]
    z = (noised.masked_BL.sum(1) - length * t) / (length * t * (1 - t)).sqrt()
    # Counts of a binomial distribution of this very t: standardised, mean 0 and variance 1.
    assert abs(z.mean()) < 4 / len(z) ** 0.5 and z.square().mean() == pytest.approx(1, abs=0.15)
    # Positions are alike; the first token may be masked too.
    share_L = noised.masked_BL.double().mean(0)
    assert (share_L - t.mean()).abs().max() < 4.5 * (0.25 / len(t)) ** 0.5


def test_low_t_drawn_more_often_is_the_same_loss_in_expectation_with_equal_weights():
    """Of a model that loses 1 + t nats at each masked token."""

    def loss_B(noised):
        counts_B = noised.masked_BL.double().sum(1)
        return counts_B * (1 + counts_B / 64) / noised.divisor_B.double() / 64

    bounds = {"count": 20_000, "t_min": 0.05, "t_max": 0.9, "cut_fraction": 0.0}
    (_, plain), (_, drawn) = forward_process(**bounds), forward_process(**bounds, log_uniform=True)
    assert drawn.divisor_B.unique().numel() == 1
    assert float(drawn.masked_BL.double().mean()) == pytest.approx(float(drawn.divisor_B[0]), abs=0.01)
    assert float(loss_B(drawn).mean()) == pytest.approx(float(loss_B(plain).mean()), rel=0.02)


def test_a_stage_follows_its_curriculum():
    stage = tiny_stages.stage("pair", steps=40, curriculum=(0.5, 0.0, 0.5))
    stage.job, stage.groups = replace(stage.job, only=()), lambda: {"one": "english", "two": "code"}
    names = [stage.plan(step)[0] for step in range(40)]
    assert set(names[:20]) == {"one"} and "two" in names[20:]


def test_the_papers_preset_reads_the_shares_that_the_paper_states():
    """Section 2.6, whatever the sets' sizes; sets of a group by size."""
    pair = load_preset("paper-0.6b").pair
    stage = tiny_stages.stage("pair", steps=2000, curriculum=pair.curriculum, shares=pair.shares)
    groups = dict(zip("abcde", ("english", "english", "cross-lingual", "multilingual", "code")))
    stage.job, stage.groups = replace(stage.job, only=()), lambda: groups
    stage.keys = lambda: dict(zip("abcde", map(np.arange, (9000, 3000, 100, 700, 20))))
    read = Counter(stage.plan(step)[0] for step in range(2000))
    told = {"a": 65.6 * 0.75, "b": 65.6 * 0.25, "c": 6.7, "d": 26.7, "e": 1.0}
    assert {name: count / 20 for name, count in read.items()} == pytest.approx(told, abs=0.1)
    stage = tiny_stages.stage("pair", shares=pair.shares)
    assert stage.job.only and "shares" not in stage.drawing()


def test_a_job_reads_the_groups_that_it_names():
    stage, rows = tiny_stages.stage("pair"), {"one": [{"group": "english"}], "two": [{"group": "code"}]}
    stage.corpus = SimpleNamespace(datasets=lambda *_: [*rows], pairs=lambda split, name: rows[name])

    def groups(*only):
        stage.job = replace(stage.job, only=only)
        return [*stage.groups()]

    assert (groups(), groups("code"), groups("one")) == (["one", "two"], ["two"], ["one"])
    with pytest.raises(ValueError, match=r"no training pairs are of \['three'\]: the corpus has {'one': "):
        groups("three")


def test_one_t_is_drawn_from_each_part_of_its_interval():
    """So a batch covers it evenly, in no order, and over many steps each sequence meets every part."""
    tokens, settings = np.full((8, 2), 5, np.int32), tiny_stages.config("diffusion", t_min=0.2, t_max=0.8)
    t_SB = np.stack([noise(tokens, settings, np.random.default_rng(s)).divisor_B for s in range(4000)])
    part_SB = ((t_SB - 0.2) / 0.6 * 8).astype(int)
    assert (np.sort(part_SB) == np.arange(8)).all()
    assert all(abs(np.bincount(part_S) - 500).max() < 100 for part_S in part_SB.T)  # standard deviation 21


def test_a_share_of_the_sequences_is_cut_and_nothing_is_masked_beyond():
    tokens, noised = forward_process(cut_fraction=0.2)
    lengths = noised.valid_BL.sum(1)
    assert not (noised.masked_BL & ~noised.valid_BL).any()
    assert (noised.valid_BL[:, 1:] <= noised.valid_BL[:, :-1]).all()  # real tokens first, then the cut
    assert lengths.min() >= 2 and (noised.tokens_BL.numpy() == tokens).all()
    assert float((lengths < 64).double().mean()) == pytest.approx(0.2, abs=0.04)
    assert lengths[lengths < 64].double().mean() == pytest.approx(32.5, abs=4)


@pytest.mark.parametrize(("quantize", "query_query"), [(True, True), (False, True), (True, False)])
def test_a_pair_step_computes_what_is_configured(quantize, query_query):
    options = {"temperature": 0.05, "margin": 0.03, "query_query": query_query}
    stage, model = tiny_stages.stage("pair", quantize=quantize, **options), tiny_stages.model("pair")
    [batch] = stage.batch(0)
    rows_RD = encode_rows(model, batch.sequences)
    rows_RD = int8(rows_RD) if quantize else rows_RD
    loss = losses.pair_loss(rows_RD[:4], rows_RD[4:], **options)
    assert_same(step(stage, model, [batch]), backpropagated(loss, model))


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_accumulation_is_the_mean_of_independent_losses_weighted_by_their_size(accumulation):
    keys = ["a", "a", "b", "c", "d", "e", "f"]  # six distinct rows, so that the batch divides unevenly
    data = {"one": tiny_stages.pairs(7, keys=keys, negatives=3)}
    options = {"batch": 7, "token_budget": 80, "accumulation": accumulation}
    hard, documents = data["one"].negatives, data["one"].documents
    hard[2][0], hard[5][1] = documents[6], documents[3]  # what was mined for one is the answer to another
    stage, model = tiny_stages.stage("triplet", data, **options), tiny_stages.model("triplet")
    parts, total = stage.batch(0), 0.0
    assert sum(part.count for part in parts) == 6
    for part in parts:
        n, rows = part.count, int8(torch.cat([encode_rows(model, [s]) for s in part.sequences]))
        texts = [s.tokens_L.tolist() for s in part.sequences]
        number_R, hard_NKD = torch.tensor([texts.index(t) for t in texts]), rows[2 * n :].reshape(n, 3, -1)
        shared = {"temperature": stage.config.temperature, "text_ids_R": number_R}
        total = total + losses.triplet_loss(rows[:n], rows[n : 2 * n], hard_NKD, **shared) * n / 6
    assert_same(step(stage, model, parts), backpropagated(total, model))


def test_each_query_has_the_negatives_it_has_and_its_own_text_is_none(monkeypatch):
    """The loss is that of lists of different lengths; one text, in whatever column, has one number."""
    data = tiny_stages.pairs(5, negatives=3)
    hard, keys = [row[: 1 + i % 3] for i, row in enumerate(data.negatives)], data.negative_keys.copy()
    keys[2, 1] = data.keys[4, 1]  # the query of row 4
    keys[1, 0] = data.keys[3, 2]  # the document of row 3, perhaps spelt in another way
    data = replace(data, negatives=hard, negative_keys=[row[: 1 + i % 3] for i, row in enumerate(keys)])
    stage = tiny_stages.stage("triplet", {"one": data}, batch=5, accumulation=1)
    model, order = tiny_stages.model("triplet"), stage.plan(0)[1].tolist()
    [part] = stage.batch(0)
    rows = int8(torch.cat([encode_rows(model, [s]) for s in part.sequences])).detach()
    number = [[f"{row} {k}" for k in range(len(hard[row]))] for row in order]
    number[order.index(2)][1], number[order.index(1)][0] = "q4", "d3"
    terms = []
    for row, q_D, d_D in zip(order, rows[:5], rows[5:10]):
        others = zip(chain(*number), rows[10:])
        left = [x_D for text, x_D in others if text not in (f"q{row}", f"d{row}")]
        s_X = torch.cosine_similarity(q_D, torch.stack([d_D, *rows[5:10], *left])) / stage.config.temperature
        terms.append(float(s_X[1:].logsumexp(0) - s_X[0]))
    assert step(stage, model, [part])[0] == pytest.approx(fmean(terms), rel=1e-5)
    shown = list(stage.shown(0))
    assert [len(lines) - 2 for lines in shown] == [len(hard[row]) for row in order]


@pytest.mark.parametrize("name", ["pair", "cde", "qwen3"])
def test_look_alikes_and_their_filter_are_used_where_the_config_says_so(name):
    """Without either, batches and losses are those of before; the filter takes terms from the loss."""
    rows, nats = {}, {}
    for case in ((0, -1.0), (4, -1.0), (0, 0.0), (4, 0.0), (0, 9.0)):
        stage = tiny_stages.stage(name, cluster_size=case[0], filter_margin=case[1], steps=4)
        model = tiny_stages.model(name)
        nats[case] = np.array([step(stage, model, stage.batch(number))[0] for number in range(4)])
        rows[case] = [(name, drawn.tolist()) for name, drawn in map(stage.plan, range(4))]
    assert rows[0, 0.0] == rows[0, 9.0] == rows[0, -1.0] != rows[4, -1.0] == rows[4, 0.0]
    assert (nats[0, 9.0] == nats[0, -1.0]).all()  # a margin that nothing exceeds
    for size in (0, 4):
        assert (nats[size, 0.0] <= nats[size, -1.0]).all()
        assert (nats[size, 0.0] < nats[size, -1.0]).any()


@pytest.mark.parametrize("late_chunking", [True, False])
@pytest.mark.parametrize("objective", ["pplx", "insent"])
def test_a_contextual_step_computes_the_objective_that_is_configured(objective, late_chunking):
    """On the codes, at each Matryoshka prefix; InSeNT without the document-level term; on chunks read in
    their document, or alone."""
    options = {"temperature": 0.05, "alpha": 0.6, "margin": 0.01}
    stage = tiny_stages.stage("contextual", objective=objective, **options)
    stage.job = replace(stage.job, late_chunking=late_chunking)
    model, [batch] = tiny_stages.model("contextual"), stage.batch(0)
    alone = [TokenSequence(chunk) for i in stage.plan(0)[1] for chunk in stage.data["one"][i].chunks]
    texts = batch.sequences if late_chunking else batch.sequences[: len(batch.document_N)] + alone
    parts = batch.split(torch.cat([encode_rows(model, [s]) for s in texts]))
    where = {"document_N": batch.document_N, "gold_N": batch.gold_N, "chunk_mask_MC": batch.mask_MC}
    loss_of, options = losses.contextual_loss, options | {"beta": stage.config.beta_start}
    if objective == "insent":
        parts, loss_of, options = parts[:2], losses.insent_loss, {"lam": 0.6, "temperature": 0.05}
    prefixes = [[int8(x)[..., :d] for x in parts] for d in stage.config.dimensions]
    loss = sum(loss_of(*vectors, **where, **options) for vectors in prefixes) / len(prefixes)
    assert_same(step(stage, model, [batch]), backpropagated(loss, model))


@pytest.mark.parametrize("late_chunking", [True, False])
def test_late_interaction_trains_the_vectors_of_tokens(late_chunking):
    """InSeNT, with all of the model's vectors but those of separators."""
    stage = tiny_stages.stage("contextual", kind=LateInteraction, alpha=0.3, temperature=0.05)
    stage.job = replace(stage.job, late_chunking=late_chunking)
    model, [batch] = tiny_stages.model("contextual"), stage.batch(0)
    read = [torch.from_numpy(text.tokens_L)[None].long() for text in batch.sequences]
    found = [model(ids)[0][0][ids[0] != stage.stored.end] for ids in read]
    lengths = [[*map(len, stage.data["one"][i].chunks)] for i in stage.plan(0)[1]]
    chunks = torch.cat(found[batch.count :]).split([*chain(*lengths)])
    counts = [*map(len, lengths)]
    mask_MC = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
    q_NLD, chunks_XKD = (pad_sequence(x, True) for x in (found[: batch.count], chunks))
    chunks_MCKD = pad_sequence(chunks_XKD.split(counts), True)
    where = {"document_N": batch.document_N, "gold_N": batch.gold_N, "chunk_mask_MC": mask_MC}
    options = {"lam": 0.3, "temperature": 0.05, "similarity": losses.mean_maxsim}
    loss = losses.insent_loss(q_NLD, chunks_MCKD, **where, **options)
    assert_same(step(stage, model, [batch]), backpropagated(loss, model))


def test_beta_goes_from_its_start_to_its_end():
    assert [cosine_ramp(0.2, 0.5, step, 11) for step in (0, 5, 10)] == pytest.approx([0.2, 0.35, 0.5])
