"""The objectives as float64 double loops, straight from the formulas: slow, and hard to get wrong."""

import math


def cosine(a, b) -> float:
    return sum(x * y for x, y in zip(a, b)) / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def pair(q, d, temperature, margin, negatives=None) -> float:
    return global_(q, d, list(range(len(q))), temperature, margin, negatives)


def global_(q, documents, document, temperature, margin, negatives=None) -> float:
    """Sums over distinct documents; `pair` is the case of one query per document. `negatives[i][j]` False: no
    term for document j and the queries about it, unless it is that of query i."""
    total = 0.0
    for i, own in enumerate(document):
        positive = cosine(q[i], documents[own])
        denominator = math.exp(positive / temperature)
        for j in range(len(documents)):
            similarity = cosine(q[i], documents[j])
            if j != own and _may(negatives, i, j, own) and similarity <= positive + margin:
                denominator += math.exp(similarity / temperature)
        for j in range(len(q)):
            similarity = cosine(q[i], q[j])
            if j != i and _may(negatives, i, document[j], own) and similarity <= positive + margin:
                denominator += math.exp(similarity / temperature)
        total -= math.log(math.exp(positive / temperature) / denominator)
    return total / len(q)


def _may(negatives, query, document, own) -> bool:
    return negatives is None or document == own or negatives[query][document]


def global_of_the_paper(q, d, hashes, temperature, margin) -> float:
    """As printed: one (possibly repeated) document per query, and the matrix M^dup."""
    total = 0.0
    for i in range(len(q)):
        positive = cosine(q[i], d[i])
        denominator = 0.0
        for j in range(len(q)):
            duplicate = hashes[i] == hashes[j] and i != j
            if not duplicate and cosine(q[i], d[j]) <= positive + margin:
                denominator += math.exp(cosine(q[i], d[j]) / temperature)
            if j != i and cosine(q[i], q[j]) <= positive + margin:
                denominator += math.exp(cosine(q[i], q[j]) / temperature)
        total -= math.log(math.exp(positive / temperature) / denominator)
    return total / len(q)


def sequence(q, chunks, document, gold, temperature, mask) -> float:
    total = 0.0
    for i in range(len(q)):
        own = chunks[document[i]]
        denominator = sum(
            math.exp(cosine(q[i], own[k]) / temperature) for k in range(len(own)) if mask[document[i]][k]
        )
        total -= math.log(math.exp(cosine(q[i], own[gold[i]]) / temperature) / denominator)
    return total / len(q)


def batch(q, chunks, document, gold, temperature, mask, negatives=None) -> float:
    total = 0.0
    for i in range(len(q)):
        denominator = 0.0
        for j in range(len(chunks)):
            for k in range(len(chunks[j])):
                if mask[j][k] and _may(negatives, i, j, document[i]):
                    denominator += math.exp(cosine(q[i], chunks[j][k]) / temperature)
        positive = cosine(q[i], chunks[document[i]][gold[i]])
        total -= math.log(math.exp(positive / temperature) / denominator)
    return total / len(q)


def insent(q, chunks, document, gold, lam, temperature, mask, negatives=None) -> float:
    """The mean over the queries of each document, then over the documents that have some."""
    of_document = {}
    for i, own in enumerate(document):
        positive = math.exp(cosine(q[i], chunks[own][gold[i]]) / temperature)
        within, across = 0.0, positive
        for j in range(len(chunks)):
            for k in range(len(chunks[j])):
                if mask[j][k] and _may(negatives, i, j, own):
                    score = math.exp(cosine(q[i], chunks[j][k]) / temperature)
                    within += score if j == own else 0
                    across += score if j != own else 0
        nats = -lam * math.log(positive / within) - (1 - lam) * math.log(positive / across)
        of_document.setdefault(own, []).append(nats)
    return sum(sum(values) / len(values) for values in of_document.values()) / len(of_document)


def triplet(q, d, hard, temperature, negatives=None) -> float:
    total = 0.0
    for i in range(len(q)):
        denominator = 0.0
        for j in range(len(q)):
            if _may(negatives, i, j, i):
                denominator += math.exp(cosine(q[i], d[j]) / temperature)
            for negative in hard[j]:
                denominator += math.exp(cosine(q[i], negative) / temperature)
        total -= math.log(math.exp(cosine(q[i], d[i]) / temperature) / denominator)
    return total / len(q)


def qwen3(q, d, hard, temperature, margin, document, hard_document) -> float:
    """`document` and `hard_document` are texts, of which equal ones are the same thing."""
    total = 0.0
    for i in range(len(q)):
        positive = cosine(q[i], d[i])
        scores = []
        for negative, text in zip(hard[i], hard_document[i], strict=True):
            if text != document[i]:
                scores.append(cosine(q[i], negative))
        for j in range(len(q)):
            if j != i and document[j] != document[i]:
                scores += [cosine(q[i], q[j]), cosine(d[i], d[j]), cosine(q[i], d[j])]
        denominator = math.exp(positive / temperature)
        for score in scores:
            if score <= positive + margin:
                denominator += math.exp(score / temperature)
        total -= math.log(math.exp(positive / temperature) / denominator)
    return total / len(q)


def diffusion(hidden, unembedding, tokens, masked, t, valid) -> float:
    total, positions = 0.0, 0
    for b in range(len(tokens)):
        for place in range(1, len(tokens[b])):
            if not (valid[b][place] and valid[b][place - 1]):
                continue
            positions += 1
            if masked[b][place]:
                logits = [sum(x * w for x, w in zip(hidden[b][place - 1], row)) for row in unembedding]
                log_partition = math.log(sum(math.exp(logit) for logit in logits))
                total += (log_partition - logits[tokens[b][place]]) / t[b]
    return total / positions


def answer(hidden, unembedding, last, answers) -> float:
    total = 0.0
    for b, place in enumerate(last):
        logits = [sum(x * w for x, w in zip(hidden[b][place], row)) for row in unembedding]
        total += math.log(sum(math.exp(logit) for logit in logits)) - logits[answers[b]]
    return total / len(last)
