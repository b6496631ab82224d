"""Cosine similarity in every precision that embeddings come in, and each query's best documents, without the
matrix of all scores. The search is exact: for an approximate one, give the vectors to faiss.

Shape suffixes: N queries · M documents · D dimensions · B bytes of packed bits · K ranks · Q queries and T
documents of a tile · C candidates · X rows.
"""

import warnings

import faiss
import numpy as np
import simsimd
import torch
from torch import Tensor
from torch.nn.functional import normalize

from unmask.data.batches import parts
from unmask.data.mining import Ranking, Search

QUERIES, DOCUMENTS = 256, 2**14  # of a tile


def similarity(queries: Tensor | np.ndarray, documents: Tensor | np.ndarray) -> Tensor:
    """Cosine similarity of every query with every document, for every precision an embedding comes in.

    - int8 codes: the dot product is exact, so equal codes always tie;
    - uint8: packed binary, most significant bit first, compared as ±1 (cosine = 1 − 2 · Hamming / D);
    - floats: in float32, or float64 if one is.

    The two sides may differ in precision. A zero vector has similarity 0 to everything.

    Args:
        queries: (N, D), or (N, D/8) if uint8.
        documents: (M, D), or (M, D/8) if uint8; on the queries' device.

    Returns:
        (N, M), float32 (float64 for any float64 input).

    Raises: ValueError for other types, and for shapes that do not fit together.

    Example:
        >>> codes = torch.tensor([[3, 4], [6, 8], [-4, 3]], dtype=torch.int8)
        >>> similarity(codes[:1], codes[1:])
        tensor([[1., 0.]])
    """
    q_ND, d_MD = _values(queries), _values(documents)
    if not q_ND.ndim == d_MD.ndim == 2 or q_ND.shape[1] != d_MD.shape[1]:
        widths = f"got {tuple(q_ND.shape)} and {tuple(d_MD.shape)}"
        raise ValueError(f"similarity compares the rows of two matrices of one width, {widths}")
    if q_ND.dtype == d_MD.dtype == torch.int8:
        return _cosines(d_MD, q_ND).T
    dtype = torch.promote_types(torch.promote_types(q_ND.dtype, d_MD.dtype), torch.float32)
    return _unit(q_ND.to(dtype)) @ _unit(d_MD.to(dtype)).T


def top_k(q_ND: np.ndarray, d_MD: np.ndarray, k: int) -> Ranking:
    """The k documents most similar (cosine) to each query, best first.

    Args:
        q_ND, d_MD: embeddings of one precision, as for `similarity`, as arrays or what becomes one; `d_MD`
            may be mapped into memory.
    Returns: scores (N, K), float32, and document numbers (N, K), int64, with K = min(k, M). Equal scores are
        in order of document number.
    Raises: ValueError for no queries, no documents or k below 1; two precisions or two numbers of dimensions;
        NaN or infinity.

    Example:
        >>> documents = np.array([[0, 1], [2, 2], [9, 1], [1, 1]], np.int8)
        >>> scores, ids = top_k(np.array([[1, 1]], np.int8), documents, 3)
        >>> ids.tolist()
        [[1, 3, 2]]
    """
    return index(d_MD)(q_ND, k)


def index(d_MD: np.ndarray) -> Search:
    """A search over documents, to be asked often: `search(q_ND, k)`, as `top_k`.

    Everything is compared, N · M · D multiplications, on the GPU if there is one (packed bits: faiss, on the
    CPU). Documents are used where they are. A score is computed from exact dot products of codes and rounded
    once, so the same pair scores the same in any search.

    Raises: ValueError as `top_k`.
    """
    d_MD = np.asarray(d_MD)
    _check(d_MD, "documents")

    def search(q_ND: np.ndarray, k: int) -> Ranking:
        q_ND = np.asarray(q_ND)
        _check_request(q_ND, d_MD, k)
        nearest = _nearest_bits if d_MD.dtype == np.uint8 else _nearest
        return tuple(x_NK.numpy() for x_NK in nearest(d_MD, q_ND, k))

    return search


def two_step(
    q_ND: np.ndarray, d_MD: np.ndarray, q_NB: np.ndarray, d_MB: np.ndarray, k: int, *, candidates: int
) -> Ranking:
    """Binary search first, rescoring after: an eighth of the memory is read for all documents, the rest for
    the candidates alone.

    The `candidates` documents nearest in Hamming distance (ties by document number) are ordered by the cosine
    of the other embeddings, usually INT8 codes. With as many candidates as documents, this is exact search.

    Args:
        q_ND, d_MD: as for `top_k`; `d_MD` may be mapped into memory, and only the candidates are read.
        q_NB, d_MB: the same texts as packed bits, uint8.
        candidates: per query, from k to M (more are M).
    Returns: as `top_k`.
    Raises: ValueError as `top_k`, if the two kinds of embeddings do not match, and for fewer candidates than
        k.
    """
    q_ND, d_MD, q_NB, d_MB = map(np.asarray, (q_ND, d_MD, q_NB, d_MB))
    if d_MD.ndim != 2 or len(q_ND) != len(q_NB) or len(d_MD) != len(d_MB) or d_MB.dtype != np.uint8:
        raise ValueError("give both kinds of embeddings of the same texts, and packed bits as uint8")
    _check_request(q_ND, d_MD, k)
    if candidates < k:
        raise ValueError(f"candidates is {candidates}: the {k} best are chosen from them: raise it")
    ids_NC = np.sort(top_k(q_NB, d_MB, candidates)[1], axis=1)
    scores_NC = torch.cat([similarity(q[None], d_MD[ids]) for q, ids in zip(q_ND, ids_NC, strict=True)])
    _check(scores_NC.numpy(), "scores of the candidates")
    return tuple(x_NK.numpy() for x_NK in _best(scores_NC.float(), torch.from_numpy(ids_NC), k))


def _check(x_XD: np.ndarray, name: str) -> None:
    if x_XD.ndim != 2 or not x_XD.size:
        raise ValueError(f"a search needs {name} as a matrix of one or more rows, got shape {x_XD.shape}")
    if x_XD.dtype.kind != "f" and x_XD.dtype not in (np.int8, np.uint8):
        raise ValueError(f"a search needs {name} as floats, int8 or uint8, got {x_XD.dtype}")
    if x_XD.dtype.kind == "f" and not np.isfinite([x_XD.min(), x_XD.max()]).all():
        row = int(np.argmin(np.isfinite(x_XD).all(axis=1)))
        raise ValueError(f"row {row} of the {name} contains NaN or infinity: look for what computed it")


def _check_request(q_ND: np.ndarray, d_MD: np.ndarray, k: int) -> None:
    _check(q_ND, "queries")
    if k < 1:
        raise ValueError(f"k is {k}: ask for one document or more")
    said = [f"{x.shape[1]} columns of {'floats' if x.dtype.kind == 'f' else x.dtype}" for x in (q_ND, d_MD)]
    if said[0] != said[1]:
        raise ValueError(f"queries have {said[0]}, documents {said[1]}: encode both in one precision")


def _nearest(d_MD: np.ndarray, q_ND: np.ndarray, k: int) -> tuple[Tensor, ...]:
    """Exact search, tile by tile: the best so far stand before the next documents."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    best = []
    for q_QD in _tensor(q_ND).to(device).split(QUERIES):
        scores_QK = ids_QK = torch.empty(len(q_QD), 0, dtype=torch.int64, device=device)
        for part in parts(len(d_MD), DOCUMENTS):
            scores_QT = similarity(q_QD, _tensor(d_MD[part]).to(device)).float()
            ids_QT = torch.arange(part.start, part.stop, device=device).expand_as(scores_QT)
            tile = torch.cat([scores_QK, scores_QT], dim=1), torch.cat([ids_QK, ids_QT], dim=1)
            scores_QK, ids_QK = _best(*tile, k)
        best.append((scores_QK.cpu(), ids_QK.cpu()))
    return tuple(map(torch.cat, zip(*best, strict=True)))


def _best(scores_QX: Tensor, ids_QX: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row, in order; equal scores as they come.

    `topk` takes any of equal scores; of all that reach the k-th best, a stable sort takes the first.
    """
    worst_Q1 = scores_QX.topk(min(k, scores_QX.shape[1])).values[:, -1:]
    columns_QC = scores_QX.topk(int((scores_QX >= worst_Q1).sum(dim=1).max())).indices.sort().values
    order_QK = scores_QX.gather(1, columns_QC).sort(dim=1, descending=True, stable=True).indices[:, :k]
    columns_QK = columns_QC.gather(1, order_QK)
    return scores_QX.gather(1, columns_QK), ids_QX.gather(1, columns_QK)


def _nearest_bits(d_MB: np.ndarray, q_NB: np.ndarray, k: int) -> tuple[Tensor, ...]:
    """The search of packed bits, for which faiss counts and keeps the k best in one pass. Its heaps keep the
    lowest numbers of equal distances, and need only be put in order."""
    best = faiss.knn_hamming(*map(np.ascontiguousarray, (q_NB, d_MB)), min(k, len(d_MB)))
    distance_NK, ids_NK = map(torch.from_numpy, best)
    ids_NK, order_NK = ids_NK.sort(dim=1)
    return _best(1 - distance_NK.gather(1, order_NK).float() * (2 / (8 * q_NB.shape[1])), ids_NK, k)


def _cosines(d_TD: Tensor, q_QD: Tensor) -> Tensor:
    """Cosines (T, Q) of int8 codes: exact dot products, scaled in float64 and rounded once to float32."""
    both = d_TD, q_QD
    if d_TD.is_cuda:
        exact = torch.float32 if d_TD.shape[1] * 128**2 <= 2**24 else torch.float64  # in any order of the sum
        d_TD, q_QD = (x_XD.to(exact) for x_XD in both)
        dots_TQ, squares = d_TD @ q_QD.T, [x_XD.square().sum(1) for x_XD in (d_TD, q_QD)]
    else:
        d_TD, q_QD = (x_XD.numpy() for x_XD in both)
        dots = simsimd.cdist(d_TD, q_QD, "dot", threads=torch.get_num_threads())
        exact = dots, simsimd.dot(d_TD, d_TD), simsimd.dot(q_QD, q_QD)
        dots_TQ, *squares = (torch.from_numpy(np.atleast_1d(x)) for x in exact)
    inverse_T, inverse_Q = (x_X.double().sqrt().clamp(min=1).reciprocal() for x_X in squares)
    return dots_TQ.double().mul_(inverse_T[:, None]).mul_(inverse_Q).float()


def _unit(x_XD: Tensor) -> Tensor:
    """Floats as rows of length 1, in float32 or better. A row's largest entry is made 1 first: no square is
    too large or too small."""
    x_XD = x_XD.to(torch.promote_types(x_XD.dtype, torch.float32))
    return normalize(normalize(x_XD, p=torch.inf, eps=torch.finfo(x_XD.dtype).tiny))


def _values(embeddings: Tensor | np.ndarray) -> Tensor:
    """Embeddings as values: packed bits (uint8) become ±1, everything else stays."""
    embeddings = torch.as_tensor(embeddings)
    if embeddings.is_floating_point() or embeddings.dtype == torch.int8:
        return embeddings
    if embeddings.dtype != torch.uint8:
        raise ValueError(f"embeddings are floats, int8 or uint8, got {embeddings.dtype}")
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=embeddings.device)
    return (2 * ((embeddings[..., None] >> shifts) & 1).to(torch.int8) - 1).flatten(-2)


def _tensor(x_XD: np.ndarray) -> Tensor:
    """An array as a tensor on the same memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes
        return torch.from_numpy(np.ascontiguousarray(x_XD))
