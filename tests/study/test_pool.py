"""The pool that systems vote on: the embedders of the paper's pool, and the vote."""

import random

import huggingface_hub
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import rehearsal
import tiny
import tiny_foreign
from fake_hub import fake_hub
from unmask import Embedder
from unmask.config import ConfigError
from unmask.evaluation.search import top_k
from unmask.store import visible
from unmask_study import mirror
from unmask_study.pool import PROMPTS, agreed, nearest, stratified
from unmask_study.settings import load_preset


def test_strata_give_as_evenly_as_they_can():
    drawn = stratified("aaaaaaaabbc", lambda letter: letter, 7)
    assert sorted(drawn) == [*"aaaabbc"] and stratified("ab", ord, 9) in ([*"ab"], [*"ba"])


def test_the_vote_is_that_of_a_naive_computation():
    rng, right = random.Random(0), []
    systems = [[rng.sample(range(30), rng.randint(0, 12)) for _ in range(40)] for _ in range(5)]
    *pool, beside = systems
    for query in range(40):
        right.append(set())
        for document in range(30):
            every = [(rank, one) for system in systems for rank, one in enumerate(system[query])]
            votes = sum(1 / (60 + rank + 1) for rank, one in every if one == document)
            if votes >= 3 / 70 and any(document in ranking[query] for ranking in pool):
                right[-1].add(document)
    assert agreed(pool, [beside]) == right and 0 < sum(map(len, right)) < 40 * 30 / 4
    assert agreed(pool, [beside], 0.0) == [{d for one in pool for d in one[query]} for query in range(40)]
    tenth = [[*range(9), 99]], [[*range(20, 29), 99]], [[*range(40, 49), 99]]  # three systems' tenth
    assert agreed(tenth) == [{99}] and agreed(tenth[:2], [[[]]]) == [set()]


POOL = [name for name in load_preset("hub-0.6b").retrieval.pool if name != "bm25"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("mirror")
    rehearsal.write_embedders(made)
    return made


@pytest.mark.parametrize("name", POOL)
def test_an_embedder_of_the_pool_reads_with_its_prompt_and_finds_the_nearest(folder, monkeypatch, name):
    monkeypatch.setenv("UNMASK_MIRROR", str(folder))
    rng = random.Random(1)
    queries, documents = ([rehearsal.text(rng, 6) for _ in range(count)] for count in (5, 40))
    model = SentenceTransformer(str(folder / name), device="cpu")
    prompt = PROMPTS.get(name, model.prompts.get("query", ""))
    assert bool(prompt) == (name != "BAAI/bge-m3")
    q_ND, d_MD = model.encode([prompt + query for query in queries], prompt=""), model.encode(documents)
    scores_NM = q_ND @ d_MD.T / np.linalg.norm(q_ND, axis=1)[:, None] / np.linalg.norm(d_MD, axis=1)
    found_NK = nearest(name, queries, documents, 7, 512)
    best_NK = -np.sort(-scores_NM, 1)[:, :7]  # random models rank some almost equally
    np.testing.assert_allclose(np.take_along_axis(scores_NM, found_NK, 1), best_NK, atol=1e-5)


def test_a_released_pplx_embed_is_read_without_its_code(tmp_path):
    path = str(tiny_foreign.released(tmp_path / "pplx"))
    codes = Embedder.from_pretrained(path).encode(tiny.TEXTS[:5])
    found = nearest(path, tiny.TEXTS[:5], tiny.TEXTS[:5], 5, 256)
    assert found.tolist() == top_k(codes, codes, 5)[1].tolist()


def test_an_embedder_is_fetched_in_its_revision(folder, tmp_path, monkeypatch):
    """On main of some there are no safetensors."""
    whole = {str(one.relative_to(folder / POOL[0])): one.read_bytes() for one in visible(folder / POOL[0])}
    main = {name: whole[name] for name in whole.keys() - {"model.safetensors"}}
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    texts = ["one text", "another"]
    with fake_hub() as hub:
        hub.add("model", "org/converted", main)
        hub.add("model", "org/converted", whole, "refs/pr/38")
        assert nearest("org/converted", texts, texts, 1, 64, "refs/pr/38").tolist() == [[0], [1]]
        with pytest.raises(ValueError, match=r"is no checkpoint: \*\.safetensors missing"):
            nearest("org/converted", texts, texts, 1, 64)


def test_what_the_pool_needs_is_asked_for_at_the_start(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("UNMASK_MIRROR", str(tmp_path))
    needs = mirror.needs(load_preset("smoke", {"retrieval.pool": ["bm25", *POOL]}))
    assert {one.repo for one in needs} == {*POOL}
    mirror.require(load_preset("smoke"))
    with pytest.raises(ValueError, match="/no/where is no directory here"):
        mirror.require(load_preset("smoke", {"retrieval.pool": ["/no/where"]}))
    lacks = load_preset("smoke", {"retrieval.pool": ["BAAI/bge-m3"]})
    mirror.require(lacks)  # the other notebooks start
    with pytest.raises(ValueError, match="lacks BAAI/bge-m3"):
        mirror.require(lacks, ["retrieval"])
    with pytest.raises(ConfigError, match=r"retrieval\.pool.*'bm25'.*got 'bm52'"):
        load_preset("smoke", {"retrieval.pool": ["bm52"]})
    with pytest.raises(ValueError, match=r"retrieval\.log: there is no file"):
        mirror.require(load_preset("smoke", {"retrieval.log": "no.jsonl"}))
