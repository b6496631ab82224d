"""The objectives as float64 double loops, straight from the formulas: slow, and hard to get wrong."""

import math
from statistics import fmean


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def nats(positive, others, temperature, margin=math.inf):
    """−log e^{positive/τ} / (e^{positive/τ} + Σ e^{other/τ}) over the others within the margin."""
    kept = [s for s in others if s <= positive + margin]
    return math.log(sum(math.exp((s - positive) / temperature) for s in [positive, *kept]))


def pair(q, d, temperature, margin, negatives=None):
    return global_(q, d, list(range(len(q))), temperature, margin, negatives)


def global_(q, documents, document, temperature, margin, negatives=None, query=None):
    """Sums over distinct documents; `pair` is the case of one query per document.

    `negatives[i][j]` False: document j and the queries about it are no negatives of query i, unless it is
    that of query i. `query` are texts, of which equal ones ask the same; None: all differ.
    """
    terms, query = [], query or range(len(q))
    for i, own in enumerate(document):
        may = [negatives is None or j == own or negatives[i][j] for j in range(len(documents))]
        answers = {document[j] for j in range(len(q)) if query[j] == query[i]}
        others = [x for j, x in enumerate(documents) if j not in answers and may[j]]
        others += [x for j, x in enumerate(q) if query[j] != query[i] and may[document[j]]]
        scores = [cosine(q[i], other) for other in others]
        terms.append(nats(cosine(q[i], documents[own]), scores, temperature, margin))
    return fmean(terms)


def global_of_the_paper(q, d, document, temperature, margin):
    """As printed: one (possibly repeated) document per query, and the matrix M^dup."""
    terms = []
    for i in range(len(q)):
        others = [d[j] for j in range(len(q)) if document[i] != document[j]] + q[:i] + q[i + 1 :]
        scores = [cosine(q[i], other) for other in others]
        terms.append(nats(cosine(q[i], d[i]), scores, temperature, margin))
    return fmean(terms)


def maxsim(query, chunk):
    """The mean over the query's tokens of the cosine with the most similar token of the chunk."""
    return fmean(max(cosine(a, b) for b in chunk) for a in query)


def chunk_terms(q, chunks, document, gold, mask, query=None, cosine=cosine):
    """For each query its document, and the similarities with its gold chunk, with the other chunks of its
    document, and with those of other documents; but those that answer the same query elsewhere. `query` as in
    `global_`."""
    query = query or range(len(q))
    for i, own in enumerate(document):
        answers = {(document[j], gold[j]) for j in range(len(q)) if query[j] == query[i]}
        within, across = [], []
        for j, row in enumerate(chunks):
            for k, chunk in enumerate(row):
                if mask[j][k] and (j, k) not in answers:
                    (within if j == own else across).append(cosine(q[i], chunk))
        yield own, cosine(q[i], chunks[own][gold[i]]), within, across


def sequence(q, chunks, document, gold, temperature, mask, query=None):
    terms = chunk_terms(q, chunks, document, gold, mask, query)
    return fmean(nats(positive, within, temperature) for _, positive, within, _ in terms)


def batch(q, chunks, document, gold, temperature, mask, query=None):
    terms = chunk_terms(q, chunks, document, gold, mask, query)
    return fmean(nats(positive, within + across, temperature) for _, positive, within, across in terms)


def insent(q, chunks, document, gold, lam, temperature, mask, query=None, cosine=cosine):
    """The mean over the queries of each document, then over the documents that have some."""
    of_document = {}
    for own, positive, within, across in chunk_terms(q, chunks, document, gold, mask, query, cosine):
        parts = nats(positive, within, temperature), nats(positive, across, temperature)
        of_document.setdefault(own, []).append(lam * parts[0] + (1 - lam) * parts[1])
    return fmean(map(fmean, of_document.values()))


def triplet(q, d, hard, temperature, query=None, document=None, hard_document=None):
    """`query`, `document` and `hard_document` are texts, of which equal ones are the same thing, and −1 is
    none; None: all differ."""
    query, document, terms = query or [-1] * len(q), document or [-1] * len(q), []
    hard_document = hard_document or [[0] * len(row) for row in hard]
    for i in range(len(q)):
        others, none = d[:i] + d[i + 1 :], (-1, query[i], document[i])
        for row, texts in zip(hard, hard_document):
            others += [negative for negative, text in zip(row, texts) if text not in none]
        terms.append(nats(cosine(q[i], d[i]), [cosine(q[i], other) for other in others], temperature))
    return fmean(terms)


def qwen3(q, d, hard, temperature, margin, query, document, hard_document):
    """The texts are as in `triplet`."""
    terms = []
    for i in range(len(q)):
        none = (-1, query[i], document[i])
        scores = [cosine(q[i], x) for x, text in zip(hard[i], hard_document[i]) if text not in none]
        for j in range(len(q)):
            if j != i and document[j] != document[i]:
                scores += [cosine(q[i], q[j]), cosine(d[i], d[j]), cosine(q[i], d[j])]
        terms.append(nats(cosine(q[i], d[i]), scores, temperature, margin))
    return fmean(terms)


def _cross_entropy(hidden, unembedding, target):
    logits = [sum(x * w for x, w in zip(hidden, row)) for row in unembedding]
    return math.log(sum(math.exp(logit) for logit in logits)) - logits[target]


def diffusion(hidden, unembedding, tokens, masked, t, valid):
    total, positions = 0.0, 0
    for b in range(len(tokens)):
        for place in range(1, len(tokens[b])):
            if valid[b][place] and valid[b][place - 1]:
                positions += 1
                if masked[b][place]:
                    total += _cross_entropy(hidden[b][place - 1], unembedding, tokens[b][place]) / t[b]
    return total / positions


def answer(hidden, unembedding, last, answers):
    return fmean(_cross_entropy(hidden[b][place], unembedding, answers[b]) for b, place in enumerate(last))
