"""Language codes of sources: ISO 639-3, with a script or without ("rus_Cyrl"), checked against the CLDR."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache

from babel import Locale
from babel.core import get_global

# Code has languages too. Those of CodeSearchNet and CoRNStack, and "code" for sets that mix several.
CODE = ("c", "code", "cpp", "csharp", "go", "java", "javascript", "php", "python", "ruby", "rust", "sql")
# "mul": many languages at once (ISO 639-2); "ber": Berber, a family that Tatoeba's authors left undivided.
_COLLECTIVE = ("mul", "ber")
_FORM = re.compile(r"([a-z]{3})(?:_([A-Z][a-z]{3}))?")


def check_language(code: str) -> None:
    """Accepts "deu", "rus_Cyrl", pairs of such ("deu-eng"), "mul" and languages of code ("python").

    Raises: ValueError that says which part is unknown and names near codes.
    """
    if code in CODE:
        return
    for part in code.split("-"):
        form = _FORM.fullmatch(part)
        if form is None:
            raise ValueError(
                f"unknown language {part!r}: write an ISO 639-3 code of three letters, with a script or "
                f"without (deu, rus_Cyrl), a pair of them (deu-eng), mul, or one of {', '.join(CODE)}"
            )
        language, script = form.groups()
        if language not in _languages():
            raise ValueError(f"unknown language {part!r}{_near(language, _languages())} (ISO 639-3)")
        scripts = Locale("en").scripts
        if script and script not in scripts:
            raise ValueError(f"unknown script {script!r} of {part!r}{_near(script, scripts)} (ISO 15924)")


def short_code(code: str) -> str:
    """The code that web standards and many data sets use: "deu" → "de", "cmn_Hani" → "zh", "gsw" → "gsw"."""
    language = code.partition("_")[0]
    return get_global("language_aliases").get(language, language)


@cache
def _languages() -> frozenset[str]:
    # The CLDR has the likely script of 7,000 languages, under the code of two letters if there is one.
    codes = (*get_global("likely_subtags"), *get_global("language_aliases"), *_COLLECTIVE)
    return frozenset(code for code in codes if len(code) == 3)


def _near(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3)
    return f"; near: {', '.join(close)}" if close else ""
