"""Many languages without a download: pairs, documents and text from the CLDR data that comes with Babel.

An *entity* is a name (of a country, language, currency, script or city), a date, a number, a quantity or an
amount of money. Its split follows from a hash of the entity and the seed: what is tested was never seen in
training, in any language or task, and another seed asks for others. Dates, numbers, quantities and amounts
are drawn from so many that unseen ones are made of seen words: there a model can generalise, whereas an
unseen name carries to another language only as far as names resemble.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import date, time, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from babel import Locale, UnknownLocaleError, dates, numbers, units
from babel.core import get_global

# Languages, units, and the sentences of statistics documents.
_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf8"))
LANGUAGES, SLICE_LANGUAGES = _TABLES["languages"], _TABLES["slice"]
# Of the statistics documents' headings; the sections are English.
HEADING_LANGUAGES = ("en", "de", "es", "fr", "it")
NAMES_PER_ENTITY = 6  # pairs of languages of one name in training; one in evaluation
DRAWS_CROSS = 3_000  # dates, quantities and amounts each, over all languages
DRAWS_MULTI = 60  # dates, numbers, quantities and amounts each, per language
DRAWN = {"cross": ("date", "quantity", "amount"), "multi": ("date", "number", "quantity", "amount")}

Rows = Iterator[dict[str, Any]]
Facts = dict[str, dict[str, Any]]  # table of sentences (in cldr.yaml) → what its sentences say


class Named(NamedTuple):
    """An entity that has a name."""

    kind: str
    code: str
    split: str
    names: dict[str, str]  # by language


def split_of(entity: str, seed: int) -> str:
    """Split of an entity from a hash of it, with the seed unless that is 0: 80 % "train", 10 % "dev", 10 %
    "test"."""
    bucket = int.from_bytes(sha256(f"{entity}{seed or ''}".encode()).digest()[:4], "big") % 10
    return {8: "dev", 9: "test"}.get(bucket, "train")


def harvest(seed: int, languages: Sequence[str]) -> tuple[list[dict], list[dict], list[dict]]:
    """Texts, pairs and documents, every row with its split under "split".

    Args:
        seed: of the splits, and of the draws of dates, numbers, quantities, amounts, language pairs and
            templates.
        languages: CLDR codes; English must be among them and there must be two at least.
    Returns: the same for the same seed and CLDR version.
    """
    locales = {language: Locale.parse(language) for language in languages}
    entities = list(_entities(locales, seed))
    monolingual = list(_draws("multi", locales, entities, seed))
    translated = [*_translated(entities, seed), *_draws("cross", locales, entities, seed)]
    documents = [row for entity in entities for row in _statistics(entity, seed)]
    return list(_texts(entities, monolingual)), translated + monolingual, documents


def _entities(locales: dict[str, Locale], seed: int) -> Iterator[Named]:
    every = {language: _names(locale) for language, locale in locales.items()}
    for kind, english in every["en"].items():
        for code in sorted(english):
            names = {language: kinds[kind][code] for language, kinds in every.items() if code in kinds[kind]}
            # One name, one entity: the city of Singapore is in the country's split.
            yield Named(kind, code, split_of(names["en"].lower(), seed), names)


def _names(locale: Locale) -> dict[str, dict[str, str]]:
    """Names in one language: kind → code → name."""
    cities = {zone: data["city"] for zone, data in locale.time_zones.items() if "city" in data}
    if locale.language == "en":  # CLDR leaves out what the zone's own name says
        zones = {zone: zone.rsplit("/", 1)[-1].replace("_", " ") for zone in get_global("zone_territories")}
        cities = zones | cities
    kinds = {"territory": locale.territories, "language": locale.languages, "currency": locale.currencies}
    return kinds | {"script": locale.scripts, "city": cities}


def _pair(mode: str, key: str, split: str, language: str, query: str, document: str) -> dict[str, str]:
    row = {"query": query, "document": document, "key": key, "dataset": f"cldr-{mode}"}
    return row | {"language": language, "package": "cldr", "split": split}


def _translated(entities: Sequence[Named], seed: int) -> Rows:
    """A name in one language → the same thing's name in another one."""
    for kind, code, split, names in entities:
        key = f"{kind}:{code}"
        pairs = [(a, b) for a in names for b in names if names[a] != names[b]]
        count = min(NAMES_PER_ENTITY if split == "train" else 1, len(pairs))
        for a, b in random.Random(f"{seed}/{key}").sample(pairs, count):
            yield _pair("cross", key, split, f"{a}-{b}", names[a], names[b])


def _draws(mode: str, locales: dict[str, Locale], entities: Sequence[Named], seed: int) -> Rows:
    """Drawn things in words → "cross": the same in another language; "multi": the same written briefly, each
    in one language only."""
    cross, known = mode == "cross", sorted(locales)
    currencies = [one.code for one in entities if one.kind == "currency" and one.split == "train"]
    turns = DRAWS_CROSS * len(known) // len(LANGUAGES) if cross else DRAWS_MULTI * len(known)
    for kind in DRAWN[mode]:
        draw, seen = random.Random(f"{seed}/{mode}/{kind}"), set()
        for turn in range(turns):
            name, value = _draw(kind, currencies, draw)
            key = f"{name}:{value}"
            a, b = draw.sample(known, 2) if cross else [known[turn // DRAWS_MULTI]] * 2
            query = _written(kind, name, value, locales[a], words=True)
            document = _written(kind, name, value, locales[b], words=cross)
            # Babel writes a unit's identifier for want of a pattern.
            identifier = kind == "quantity" and name in query + document
            if key not in seen and query != document and not identifier:
                seen.add(key)
                yield _pair(mode, key, split_of(key, seed), f"{a}-{b}" if cross else a, query, document)


def _draw(kind: str, currencies: list[str], draw: random.Random) -> tuple[str, Any]:
    """One date, number, quantity or amount: what it is of, and its value."""
    if kind == "date":
        return kind, date(1950, 1, 1) + timedelta(days=draw.randrange(36_500))
    if kind == "number":
        return kind, draw.randrange(11, 1_000) * 10 ** draw.randrange(2, 8)
    if kind == "quantity":
        return draw.choice(_TABLES["units"]), draw.randrange(2, 1_000)
    return draw.choice(currencies), draw.randrange(2, 5_000)


def _written(kind: str, name: str, value: Any, locale: Locale, *, words: bool) -> str:
    """How a locale writes what was drawn, in words or briefly."""
    if kind == "date":
        return dates.format_date(value, "full" if words else "short", locale)
    if kind == "quantity":
        return units.format_unit(value, name, "long" if words else "short", locale=locale)
    if kind == "amount":
        return numbers.format_currency(
            value, name, locale=locale, format_type="name" if words else "standard"
        )
    if not words:
        return numbers.format_decimal(value, locale=locale)
    # Chinese, Japanese and Korean have one way only to abbreviate large numbers.
    longest = "long" if "long" in locale.compact_decimal_formats else "short"
    return numbers.format_compact_decimal(value, format_type=longest, fraction_digits=2, locale=locale)


def _texts(entities: Sequence[Named], pairs: Sequence[dict[str, str]]) -> Rows:
    """Pretraining text: every training name in all languages, then training pairs, forty of one language at a
    time."""
    about = {"package": "cldr", "kind": "cldr", "split": "train"}
    for kind, _, split, names in entities:
        if split == "train":
            lines = [f"{language}: {name}" for language, name in names.items()]
            yield {"text": "\n".join([kind, *lines]), "language": "mul"} | about
    pairs = [pair for pair in pairs if pair["split"] == "train"]
    for language in dict.fromkeys(pair["language"] for pair in pairs):
        same = (pair for pair in pairs if pair["language"] == language)
        lines = [f"{pair['query']} = {pair['document']}" for pair in same]
        for start in range(0, len(lines), 40):
            yield {"text": "\n".join(lines[start : start + 40]), "language": language} | about


def _statistics(entity: Named, seed: int) -> Rows:
    """Documents of figures: only the heading names the country, language or currency.

    The sections hold figures and formats, no names of other entities, so no name held out appears in training
    either. Training documents also come with the heading and queries in other languages than English.
    """
    facts = {"territory": _of_territory, "language": _of_language, "currency": _of_currency}
    tables = facts[entity.kind](entity.code) if entity.kind in facts else {}
    sections = [
        (topic, [sentence.format(**values) for sentence in sentences])
        for table, values in tables.items()
        for topic, sentences in _TABLES["sections"][table].items()
    ]
    used = set()
    for language in HEADING_LANGUAGES if entity.split == "train" else ("en",):
        name = entity.names.get(language)
        if len(sections) < 4 or not name or name.lower() in used:
            continue
        used.add(name.lower())
        key = f"cldr/{entity.kind}/{entity.code}"
        path = f"{entity.kind}/{entity.code}/{language}"
        draw = random.Random(f"{seed}/statistics/{path}")
        mixed = draw.sample(sections, len(sections))
        heading = draw.choice(_TABLES["headings"]).format(name=name, noun=_TABLES["nouns"][entity.kind])
        queries = [draw.choice(_TABLES["queries"]).format(topic=topic, name=name) for topic, _ in mixed]
        chunks = [heading, *(draw.choice(sentences) for _, sentences in mixed)]
        about = {"document_id": f"cldr/{path}", "key": key, "dataset": "statistics", "package": "cldr"}
        about |= {"language": language, "split": entity.split}
        yield about | {"chunks": chunks, "queries": queries, "golds": list(range(1, len(chunks)))}


def _of_territory(code: str) -> Facts:
    """Facts about a country; none for what is no country (continents) or has no locale."""
    spoken, locale = get_global("territory_languages").get(code, {}), _locale(f"und_{code}")
    if locale is None or not spoken or not code.isalpha():
        return {}
    territory = {"spoken": len(spoken), "zones": len(get_global("territory_zones").get(code, ()))}
    territory["share"] = max(facts["population_percent"] for facts in spoken.values())
    territory["official"] = sum(facts["official_status"] is not None for facts in spoken.values())
    facts = {"territory": territory, "formats": _formats(locale)}
    for money, start, end, tender in get_global("territory_currencies").get(code, []):
        if tender and not end and start:  # the last one of several
            price = numbers.format_currency(1234.5, money, locale=locale)
            facts["money"] = {"money": money, "since": start[0], "price": price}
    return facts


def _of_language(code: str) -> Facts:
    """Facts about a language; none where CLDR has no locale for it."""
    if (locale := _locale(code)) is None:
        return {}
    forms = ["other", *sorted(locale.plural_form.tags)]
    direction = {"ltr": "left to right", "rtl": "right to left"}[locale.text_direction]
    language = {"direction": direction, "count": len(forms), "forms": ", ".join(forms)}
    facts = {"language": language, "formats": _formats(locale)}
    known = get_global("territory_languages").values()
    if shares := [spoken[code]["population_percent"] for spoken in known if code in spoken]:
        facts["speakers"] = {"countries": len(shares), "share": max(shares)}
    return facts


def _formats(locale: Locale) -> dict[str, str]:
    """How a locale writes numbers, dates, times and shares, and when its week begins."""
    english = Locale.parse("en").days["format"]["wide"]
    week = {"first": locale.first_week_day, "start": locale.weekend_start, "end": locale.weekend_end}
    return {
        "number": numbers.format_decimal(1234567.8, locale=locale),
        "part": numbers.format_percent(0.25, locale=locale),
        "day": dates.format_date(date(2023, 3, 14), "short", locale=locale),
        "hour": dates.format_time(time(15, 30), "short", locale=locale),
    } | {name: english[day] for name, day in week.items()}


def _of_currency(code: str) -> Facts:
    """Facts about a currency; none for units that no country ever paid with."""
    every = get_global("territory_currencies").values()
    uses = (use for uses in every for use in uses if use[0] == code and use[1] and use[3])
    tenders = [(start[0], end and end[0]) for _, start, end, _ in uses]
    if not tenders:
        return {}
    current = sum(end is None for _, end in tenders)
    last = max((end for _, end in tenders if end), default=None)
    ended = "It is still legal tender" if current else f"It ceased to be legal tender in {last}"
    currency = {"current": current, "ever": len(tenders), "ended": ended}
    currency["first"] = min(start for start, _ in tenders)
    currency["decimals"] = numbers.get_currency_precision(code)
    currency["symbol"] = numbers.get_currency_symbol(code, "en")
    return {"currency": currency}


def _locale(code: str) -> Locale | None:
    """The locale for a language, or for a territory's main language; None where CLDR has none."""
    with suppress(UnknownLocaleError, ValueError):
        return Locale.parse(code)
    return None
