"""Korean particles that depend on the final sound of the word in front of them."""

from __future__ import annotations

PAIRS = {  # form: (after a final consonant, after a vowel)
    "은": ("은", "는"),
    "이": ("이", "가"),
    "을": ("을", "를"),
    "과": ("과", "와"),
    "으로": ("으로", "로"),
    "이라": ("이라", "라"),
    "이나": ("이나", "나"),
    "이란": ("이란", "란"),
    "이에요": ("이에요", "예요"),
}
_DIGITS = "영일이삼사오육칠팔구"
_LATIN = {  # how words written in Latin letters end when they are read in Korean
    "python": "썬", "javascript": "트", "typescript": "트", "java": "바", "rust": "트", "go": "고", "sql": "엘",
    "html": "엘", "css": "스", "json": "슨", "csv": "이", "api": "이", "git": "깃", "bash": "시", "http": "피",
    "url": "엘", "c": "씨", "c++": "플", "ai": "이", "linux": "스", "docker": "커", "sqlite": "트", "react": "트",
    "km": "터", "kg": "램", "m": "터", "cm": "터", "g": "램", "l": "터", "ml": "터", "usd": "러", "eur": "로",
}  # fmt: skip


def with_particle(word: str, form: str) -> str:
    """Return `word` with the particle `form`, or the particle alone if `form` starts with "-" (for quoted words).

    `form` is a key of PAIRS. KeyError for a form, or the reading of a Latin word, that is not known.
    """
    name = form.removeprefix("-")
    closed, open_ = PAIRS[name]
    last = _last_syllable(word)
    final = (ord(last) - ord("가")) % 28  # 0: no final consonant, 8: ㄹ
    particle = open_ if final == 0 or (final == 8 and name == "으로") else closed
    return particle if form.startswith("-") else word + particle


def _last_syllable(word: str) -> str:
    last = word.rstrip("'\")]’”」』")[-1]
    if "가" <= last <= "힣":
        return last
    if last == "%":
        return "트"
    if last.isdigit():
        return _number_ending(word)
    return _LATIN[word.replace("(", " ").replace(")", " ").split()[-1].lower()]


def _number_ending(word: str) -> str:
    digits = word[len(word.rstrip("0123456789,.")) :].replace(",", "")
    if digits[-1] != "0" or "." in digits or digits == "0":
        return _DIGITS[int(digits[-1])]
    zeros = len(digits) - len(digits.rstrip("0"))
    return "십" if zeros == 1 else "백" if zeros == 2 else "천" if zeros == 3 else "만" if zeros < 8 else "억"
