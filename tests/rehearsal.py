"""A rehearsal of the presets that read the Hub, on any machine and without it: a mirror with made-up rows for
every source, in the schemas that the data sets document, and small random models with the files of the real
ones; then the notebooks, with two steps a training.

    python tests/rehearsal.py [--presets hub-0.6b …] [--processes 1 2] [--to 03]

Rows, configurations and columns are as in the registry, batches as in the preset; SMALL and rehearsal.yaml
say what is not.
"""

import argparse
import io
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from fake_hub import fake_hub
from unmask.data.registry import CONTEB, Source, conteb, load_registry, split_of
from unmask.store import repository
from unmask_study import mirror as mirrors
from unmask_study.settings import load_preset

ROWS = {"train": 12, "dev": 2, "test": 4}  # of a source
WORDS = [a + b + c for a in ("ka", "lo", "mi", "ter") for b in "bdgnrs" for c in ("an", "el", "is", "om")]
TOLD = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf8"))
SMALL = {f"{name}.{key}": value for name, part in TOLD["changes"].items() for key, value in part.items()}
SCHEMAS = yaml.safe_load((Path(__file__).parent / "data" / "documented_schemas.yaml").read_text("utf8"))
BASES = {"qwen3": transformers.Qwen3ForCausalLM, "smollm2": transformers.LlamaForCausalLM}


def text(rng: random.Random, words: int = 14, space: str = " ") -> str:
    return space.join(rng.choices(WORDS, k=words))


def held(source: Source, split: str, base: str, space: str = " ") -> str:
    """A text that a source holds in this split; without a hold-out, any."""
    split = split if source.hold_out else "train"
    return next(one for i in itertools.count() if split_of(source, one := f"{base}{space}{i}") == split)


def blank(kind: Any, rng: random.Random) -> Any:
    """Made-up content of a documented type."""
    if isinstance(kind, list):
        return [blank(kind[0], rng) for _ in range(4)]
    if isinstance(kind, dict):
        return {name: blank(one, rng) for name, one in kind.items()}
    return {"string": text(rng), "int64": 1, "float64": 0.5}[kind]


def blank_row(source: Source, config: str, rng: random.Random) -> dict[str, Any]:
    """A row of the documented columns of a configuration; ConTEB's for its tasks that record none."""
    for record in SCHEMAS.get(source.repo, ()):
        if any(fnmatchcase(config, pattern) for pattern in record["configs"]):
            return blank(record["columns"], rng)
    return {"chunk_id": "", "chunk" if config == "documents" else "query": text(rng)}


def row_with(source: Source, column: str, value: str, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A value in a column's path such as "positive_passages.0.text", and its configuration."""
    found = row = blank_row(source, source.config, rng)
    *steps, last = source.columns[column].split(".")
    for step in steps:
        found = found[int(step) if step.isdigit() else step]
    assert last in found, f"{source.columns[column]} is not documented"
    found[last] = value
    return source.config, row


def rows_of(source: Source, rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with the configuration in which each is."""
    for split in itertools.chain.from_iterable([split] * count for split, count in ROWS.items()):
        if source.queries_config:
            name = held(source, split, text(rng, 2, "-"), "-")
            for chunk in range(4):  # nobody asks for the last one
                for config in (source.config, source.queries_config)[: 2 if chunk < 3 else 1]:
                    yield config, blank_row(source, config, rng) | {"chunk_id": f"{name}_{chunk}"}
        else:
            decides = next(one for one in ("held_by", "text", "document") if one in source.columns)
            base = text(rng, 60 if decides == "text" else 14)
            yield row_with(source, decides, held(source, split, base), rng)
    if source.role in ("pairs", "triplets"):  # the cards warn of empty texts
        yield row_with(source, "query", "", rng)


def write_mirror(folder: Path, registries: Sequence[str], tasks: Sequence[str]) -> None:
    """A repository for every source of some registries, and for ConTEB's tasks."""
    found: dict[str, dict[tuple[str, str], list]] = {}
    named = [one for name in registries for one in load_registry(name) if one.kind == "hub"]
    places = {(one.repo, one.config, one.queries_config): one for one in named}  # one for all that read it
    for number, source in enumerate([*places.values(), *map(conteb, tasks)]):
        for config, row in rows_of(source, random.Random(number)):
            found.setdefault(source.repo, {}).setdefault((config, source.split), []).append(row)
    for repo, parts in found.items():
        configs: dict[str, list[dict[str, str]]] = {}
        for (config, split), rows in parts.items():
            place = folder / repo / (config or "data")
            place.mkdir(parents=True, exist_ok=True)
            if "HQ" in repo:  # their files hold a vector of each text beside it
                rows = [row | {"embeddings": [0.1] * 8} for row in rows]
            for part in range(2):
                table = pa.Table.from_pylist(rows[part::2])
                pq.write_table(table, place / f"{split}-{part:05d}-of-00002.parquet")
            # As of some: beside it a split that nothing here reads, and no mirror holds.
            files = [{"split": one, "path": f"{place.name}/{one}-*"} for one in (split, f"{split}_unread")]
            configs.setdefault(config or "default", []).extend(files)
        card = [{"config_name": name, "data_files": files} for name, files in configs.items()]
        (folder / repo / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': card})}---\n")


@cache
def tokenizer(family: str) -> Tokenizer:
    """Byte-level BPE with the special tokens of a family's base models and as many others, of few merges."""
    told, learnt = TOLD[family], Tokenizer(models.BPE())
    learnt.decoder, bytes_ = decoders.ByteLevel(), pre_tokenizers.ByteLevel(add_prefix_space=False)
    learnt.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])
    if family == "qwen3":
        theirs = transformers.Qwen2Tokenizer().backend_tokenizer
        learnt.normalizer, learnt.pre_tokenizer = theirs.normalizer, theirs.pre_tokenizer
    alphabet, first = sorted(pre_tokenizers.ByteLevel.alphabet()), told["first"]
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=first)
    learnt.train_from_iterator([text(random.Random(0), 2000)], trainer)
    model = json.loads(learnt.to_str())["model"]
    fillers = {f"<filler {i}>": i for i in range(len(model["vocab"]), told["plain"])}
    learnt.model = models.BPE(model["vocab"] | fillers, [tuple(merge) for merge in model["merges"]])
    learnt.add_special_tokens([AddedToken(token, special=True) for token in told["special"]])
    learnt.add_tokens([AddedToken(token) for token in told["ordinary"]])
    assert learnt.get_vocab_size() <= told["sizes"]["vocab_size"]
    return learnt


def write_base(folder: Path, family: str) -> None:
    """A random model with the files and the configuration keys of a family's base models, small widths."""
    told, own, kind = TOLD[family], tokenizer(family), BASES[family]
    torch.manual_seed(0)
    kind(kind.config_class(**told["sizes"])).bfloat16().save_pretrained(folder)
    kinds = dict.fromkeys(told["ordinary"], False) | dict.fromkeys(told["special"], True)
    kinds = {token: TOLD["token"] | {"content": token, "special": kind} for token, kind in kinds.items()}
    about = {"added_tokens_decoder": {str(own.token_to_id(token)): one for token, one in kinds.items()}}
    about |= {"additional_special_tokens": told["special"][1:]} | told["tokenizer"]
    files = {"config.json": told["sizes"] | told["others"], "tokenizer_config.json": about}
    end = told["others"]["eos_token_id"]
    files["generation_config.json"] = {"bos_token_id": end, "eos_token_id": end}
    own.save(str(folder / "tokenizer.json"))
    own.model.save(str(folder))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2))


def write_embedder(folder: Path, kind: Any, shape: dict, pooling: str, *more: Any, prompts=None) -> None:
    """A random encoder of sentence-transformers: Transformer, Pooling, what else is given, Normalize."""
    plain = folder.with_name(f"{folder.name}-plain")
    torch.manual_seed(0)
    kind(kind.config_class(vocab_size=TOLD["qwen3"]["sizes"]["vocab_size"], **shape)).save_pretrained(plain)
    special = dict.fromkeys(("pad_token", "eos_token"), "<|endoftext|>")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer("qwen3"), **special)
    fast.save_pretrained(plain)
    parts = [Transformer(str(plain), max_seq_length=512), Pooling(32, pooling), *more, Normalize()]
    SentenceTransformer(modules=parts, device="cpu", prompts=prompts).save(str(folder))


def pull_converted(folder: Path, name: str, mirror: Path) -> None:
    """Pulls an embedder of the pool that lies on a Hub as some do: with weights in pickle on main, and beside
    them in safetensors in a pull request alone."""
    pool = load_preset("paper-0.6b").retrieval
    files = {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}
    torch.save(load_file(folder / "model.safetensors"), pickled := io.BytesIO())
    files["pytorch_model.bin"] = pickled.getvalue()
    main = {file: content for file, content in files.items() if file != "model.safetensors"}
    changes = {"retrieval.pool": [name], "retrieval.pool_revisions": pool.pool_revisions}
    with fake_hub() as hub, pytest.MonkeyPatch.context() as patch:
        hub.add("model", name, main)
        hub.add("model", name, files, pool.pool_revisions[name])
        patch.setenv("UNMASK_MIRROR", str(mirror))  # which a pull changes
        mirrors.pull(load_preset("smoke", changes), mirror)


def write_embedders(mirror: Path) -> None:
    """CDE's surrogate, and the embedders of the paper's pool."""
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    dense = Dense(32, 24, bias=False, activation_function=torch.nn.Identity())
    gtr = mirror / "sentence-transformers" / "gtr-t5-base"
    write_embedder(gtr, transformers.T5EncoderModel, t5, "mean", dense)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    roberta = transformers.XLMRobertaModel, shape | {"max_position_embeddings": 514}
    with TemporaryDirectory() as folder:
        write_embedder(Path(folder, "bge-m3"), *roberta, "cls")
        pull_converted(Path(folder, "bge-m3"), "BAAI/bge-m3", mirror)
    write_embedder(mirror / "intfloat" / "multilingual-e5-large-instruct", *roberta, "mean")
    qwen3 = transformers.Qwen3Model, shape | {"num_key_value_heads": 2, "head_dim": 8}
    prompts = {"query": "Instruct: Given a web search query, …\nQuery:", "document": ""}
    write_embedder(mirror / "Qwen" / "Qwen3-Embedding-0.6B", *qwen3, "lasttoken", prompts=prompts)


def told(changes: dict[str, Any]) -> list[str]:
    """Changed values as the command line takes them."""
    return [part for key, value in changes.items() for part in ("--set", f"{key}={json.dumps(value)}")]


def rehearse(preset: str, processes: int, folder: Path, *arguments: str) -> int:
    """Runs a preset on the mirror in a folder; returns the exit status."""
    changes = SMALL | {"parallel.num_processes": processes, "parallel.num_machines": 1}
    run = ["run", "--preset", preset, "--run", f"rehearsal-{preset}-{processes}", *told(changes), *arguments]
    environment = {"UNMASK_MIRROR": str(folder / "mirror"), "UNMASK_ARTIFACTS": str(folder / "artifacts")}
    command = [sys.executable, "-m", "unmask_study", *run]
    return subprocess.call(command, cwd=repository(), env=os.environ | environment)


def prepare(folder: Path) -> None:
    """The mirror of everything that the presets read."""
    mirror = folder / "mirror"
    write_mirror(mirror, ("open", "paper"), list(CONTEB))
    for size in ("0.6B", "4B"):
        write_base(mirror / "Qwen" / f"Qwen3-{size}-Base", "qwen3")
    write_base(mirror / "HuggingFaceTB" / "SmolLM2-135M", "smollm2")
    write_embedders(mirror)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--presets", nargs="+", default=("hub-135m", "hub-0.6b", "paper-0.6b", "paper-4b"))
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--folder", type=Path, help="of mirror and artifacts, kept; default: a temporary one")
    options, more = parser.parse_known_args()
    with TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "mirror" / "sentence-transformers" / "gtr-t5-base" / "modules.json").is_file():
            prepare(folder)
        for preset, processes in itertools.product(options.presets, options.processes):
            print(f"{time.strftime('%X')}: {preset} on {processes} processes", flush=True)
            if status := rehearse(preset, processes, folder, *more):
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
