r"""From answer text to tokens: Unicode, LaTeX spelling, number formats. Linear, nothing evaluated.

`canonical_text` is what two answers are compared by before anything is parsed; `tokenize` is what
`math_parse` reads.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

MAX_ANSWER = 4000
"""Characters of the longest answer that is parsed; a longer one is compared as text only."""


class ParseError(ValueError):
    """The text is not mathematics that we read. Never leaves the verifier."""


_SUPERSCRIPT = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni")
_SUBSCRIPT = str.maketrans("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙ", "0123456789+-()n")
_SUPER_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ]+")
_SUB_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙ]+")
_VULGAR = re.compile("[¼½¾⅐-⅞]")
_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "∕": "/", "⁄": "/",
    "×": r"\times ", "÷": r"\div ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "√": r"\sqrt ", "∛": r"\sqrt[3] ", "∜": r"\sqrt[4] ", "∞": r"\infty ", "°": r"\degree ",
    "±": r"\pm ", "∓": r"\mp ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ",
    "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ",
    "∖": r"\setminus ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "∑": r"\sum ", "∏": r"\prod ", "∫": r"\int ",
    "…": r"\ldots ", "⋯": r"\ldots ", "、": ",", "。": ".", "“": '"', "”": '"', "’": "'",
    "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "⌈": r"\lceil ", "⌉": r"\rceil ", "∠": r"\angle ", "′": "'", "ϕ": r"\phi ", "ﬀ": "ff",
    "€": r"\euro ", "£": r"\pounds ", "¥": r"\yen ", "￥": r"\yen ", "₹": r"\rupee ",
    "∶": ":", "℃": r"\degree C", "ﬁ": "fi",
}  # fmt: skip
_GREEK = dict(
    zip(
        "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ",
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho sigma tau "
        "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega".split(),
        strict=True,
    )
)
_SYMBOL_TABLE = str.maketrans(
    {**_SYMBOLS, **{letter: f"\\{name} " for letter, name in _GREEK.items()}}
)
_CONTROL = {"\f": r"\f", "\b": r"\b", "\t": r"\t"}
_ESCAPED = re.compile(r"\f(?=rac)|\x08(?=oxed|inom|egin|ar\b)|\t(?=ext\{|imes|frac|heta)")
_INVISIBLE = re.compile("[\u200b-\u200f\u2060\ufeff\u00ad]")

_DEGREE = re.compile(r"\^\s?(?:\{\s?\\(?:circ|degree)\s?\}|\\(?:circ|degree)(?![A-Za-z]))")
_THIN = re.compile(r"(?<=\d)(?:\{,\}\s?|,?\\[,!;: ]|\\thinspace\s?|,\\!)\s?(?=\d{3}(?!\d))")
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?:[ \u00a0\u202f]\d{3})+(?![\d])")
GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d|,\d)")
"""A number with commas for thousands, which may also be a list without spaces."""

_TIMES_TEN = re.compile(r"(?<=\d)\s*[xX]\s*(?=10\s*\^)")
_E_NOTATION = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d{1,6})(?![\w.])")
_ORDINAL = re.compile(r"(?<=\d)\s?\^\s?\{?\s?(?:\\text\s?\{\s?)?(?:st|nd|rd|th)(?:\s?\}){0,2}")
_COLOR = re.compile(r"\\(?:text)?color\s?\{[A-Za-z!0-9]{1,20}\}")
_TRAILING = re.compile(r"(?:(?<!\\)[\s.,;:$])+\Z")
_CLOCK = re.compile(r"(?<=\d)\s*(?:\\(?:text|mathrm)\{)?[~\s]*([ap])\.\s?m\.?\}?")

_COMMANDS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom",
    "leq": "le", "leqslant": "le", "geq": "ge", "geqslant": "ge", "neq": "ne", "lt": "<",
    "gt": ">", "lbrace": "{", "rbrace": "}", "lbrack": "[", "rbrack": "]", "ast": "cdot",
    "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "dots": "ldots", "cdots": "ldots",
    "dotsc": "ldots", "dotsb": "ldots", "vdots": "ldots", "varnothing": "emptyset",
    "smallsetminus": "setminus", "backslash": "setminus", "to": "to", "rightarrow": "to",
    "infin": "infty", "circ": "degree", "approxeq": "approx", "sim": "approx", "colon": ":",
    "lor": "or", "vee": "or", "land": "and", "wedge": "and", "varepsilon": "epsilon",
    "varphi": "phi", "vartheta": "theta", "arccos": "acos", "arcsin": "asin", "arctan": "atan",
    "lg": "log10", "ast ": "cdot", "star": "cdot", "bmod": "mod", "iff": "=", "pounds": "pounds",
}  # fmt: skip
_IGNORED = frozenset(
    "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr middle displaystyle "
    "textstyle scriptstyle limits nolimits quad qquad enspace thinspace hspace phantom rm bf it sf "
    "mathrm@ boldmath noindent hfill hline smallskip medskip bigskip protect nonumber Large large "
    "therefore because".split()
)
_TEXT = frozenset(
    "text textbf textit textrm textsf texttt textnormal mbox hbox emph textsc mathrm mathsf "
    "operatorname mathtt mathit unit".split()
)
_STYLE = frozenset("mathbf boldsymbol bm mathcal mathfrak mathscr pmb ensuremath".split())
_ROMAN_MATH = frozenset("mathrm mathit operatorname mathsf mathtt".split())


@dataclass(frozen=True, slots=True)
class Token:
    """kind: num, run (letters in math mode), word (letters in text mode), cmd, or op."""

    kind: str
    value: str
    spaced: bool = False


def unescaped(text: str) -> str:
    r"""Put back the backslash of `\frac`, `\boxed`, `\text` that a string escape has eaten."""
    return _ESCAPED.sub(lambda m: _CONTROL[m.group()], text)


def plain_unicode(text: str) -> str:
    """Mathematical Unicode written as LaTeX, full-width forms and odd blanks as ASCII."""
    if text.isascii():
        return text
    text = _INVISIBLE.sub("", text)
    text = _SUPER_RUN.sub(lambda m: "^{" + m.group().translate(_SUPERSCRIPT) + "}", text)
    text = _SUB_RUN.sub(lambda m: "_{" + m.group().translate(_SUBSCRIPT) + "}", text)
    text = _VULGAR.sub(_vulgar, text)
    text = text.translate(_SYMBOL_TABLE)
    return unicodedata.normalize("NFKC", text).translate(_SYMBOL_TABLE)


def _vulgar(match: re.Match[str]) -> str:
    over, under = unicodedata.normalize("NFKC", match.group()).split("⁄")
    return rf"\frac{{{over}}}{{{under}}}"


def canonical_text(text: str) -> str:
    """The text without what never carries meaning: blanks, `$`, `\\left`, a final full stop."""
    text = plain_unicode(text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = re.sub(r"\\(?:left|right|displaystyle)(?![A-Za-z])|\\[,;:! ]|[$~]", "", text)
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)
    text = _DEGREE.sub("", text) if "circ" in text else text
    return text.rstrip(".,;:")


def tokenize(text: str, *, thousands: bool = True) -> list[Token]:
    """Tokens of an answer. `thousands`: read `1,234` as one number, otherwise as a list.

    Raises:
        ParseError: too long, braces that do not match, or a character we do not know.
    """
    if len(text) > MAX_ANSWER:
        raise ParseError("longer than an answer may be")
    text = plain_unicode(text).strip()
    if "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z]{2})", r"\\", text)  # escaped twice
    text = _TIMES_TEN.sub(r"\\times ", text)
    text = _E_NOTATION.sub(r"\1\\times 10^{\2}", text)
    text = _DEGREE.sub(r"\\degree ", text)
    text = _ORDINAL.sub("", text)
    text = _THIN.sub("", text)
    text = _SPACED.sub(lambda m: re.sub(r"\s", "", m.group()), text)
    if thousands:
        text = GROUPED.sub(lambda m: m.group().replace(",", ""), text)
    text = _COLOR.sub("", text)
    text = _outer_braces(_TRAILING.sub("", _CLOCK.sub(r" \\text{\1m}", text)))
    money = text.replace("\\$", "").count("$") % 2 == 1
    return _Lexer(text, money=money).run()


_INFIX = re.compile(r"\\(?:choose|over)(?![A-Za-z])")
"""What takes all that stands in the braces around it."""


def _outer_braces(text: str) -> str:
    """Without a pair of braces, or a line, around everything."""
    if _INFIX.search(text):
        return text
    while text.startswith(("{", "\\underline{")) and text.endswith("}"):
        text = text.removeprefix("\\underline")
        depth = 0
        for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
            depth += {"{": 1, "}": -1}.get(match.group(), 0)
            if depth == 0:
                break
        if match.end() != len(text):
            break
        text = text[1:-1].strip()
    return text


_NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
_LETTERS = re.compile(r"[A-Za-z]+")
_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")
_COMMAND = re.compile(r"\\([A-Za-z]+)\*?")
_ENVIRONMENT = re.compile(
    r"\s*\{\s*([a-z]{0,2}matrix|array|cases|aligned|align)\*?\s*\}(\{[clr|@ ]*\})?"
)
_OPS = frozenset("+-*/^_!|()[]{}<>=,;:&'%~")
_CURRENCY = {"$": "dollar", "euro": "euro", "pounds": "pound", "yen": "yen", "rupee": "rupee"}


class _Lexer:
    def __init__(self, text: str, *, money: bool) -> None:
        self.text, self.at, self.money = text, 0, money
        self.tokens: list[Token] = []
        self.spaced = False

    def run(self) -> list[Token]:
        self._math(len(self.text))
        return self.tokens

    def _emit(self, kind: str, value: str) -> None:
        self.tokens.append(Token(kind, value, self.spaced))
        self.spaced = False

    def _math(self, end: int) -> None:
        while self.at < end:
            char = self.text[self.at]
            if char.isspace() or char == "~":
                self.spaced, self.at = True, self.at + 1
            elif match := _NUMBER.match(self.text, self.at):
                self.at = match.end()
                self._emit("num", match.group())
            elif match := _LETTERS.match(self.text, self.at):
                self.at = match.end()
                self._letters(match.group())
            elif char == "\\":
                self._command()
            elif char == "$":
                self.at += 1
                if self.money and re.match(r"\s?-?\s?[\d.]", self.text[self.at : self.at + 4]):
                    self._emit("op", "$dollar")
            elif char == "*" and self.text.startswith("**", self.at):
                self.at += 2
                self._emit("op", "^")
            elif two := {"<=": "le", ">=": "ge", "!=": "ne", "=>": "to", "->": "to", "==": "="}.get(
                self.text[self.at : self.at + 2]
            ):
                self.at += 2
                self._emit("op" if two == "=" else "cmd", two)
            elif char in _OPS:
                self.at += 1
                self._emit("op", char)
            elif char in '"`':
                self.at += 1
            elif char == ".":
                self.at += 1
                if self.text[self.at :].startswith(".."):
                    self.at += 2
                    self._emit("cmd", "ldots")
                else:
                    self._emit("op", ".")
            elif match := _WORD.match(self.text, self.at):
                self.at = match.end()
                self._emit("word", match.group())
            else:
                raise ParseError(f"unknown character U+{ord(char):04X}")

    def _letters(self, run: str) -> None:
        lower = run.lower()
        if lower in ("or", "and"):
            self._emit("op", "or" if lower == "or" else ",")
        else:
            self._emit("run", run)

    def _command(self) -> None:
        match = _COMMAND.match(self.text, self.at)
        if match is None:
            self._escape()
            return
        name = match.group(1)
        self.at = match.end()
        if name in ("begin", "end"):
            environment = _ENVIRONMENT.match(self.text, self.at)
            if environment is None:
                raise ParseError(f"unknown environment after \\{name}")
            self.at = environment.end()
            self._emit("cmd", f"{name}{environment.group(1)}")
        elif name in _TEXT:
            self._text(name)
        elif name in _STYLE:
            pass  # its argument is an ordinary group
        elif name in _IGNORED:
            self.spaced = True
            if name in ("left", "right") and self.text[self.at : self.at + 1] == ".":
                self.at += 1
        elif name in _CURRENCY:
            self._emit("op", "$" + _CURRENCY[name])
        else:
            name = _COMMANDS.get(name, name)
            if name in ("or", "and"):
                self._emit("op", "or" if name == "or" else ",")
            else:
                self._emit("op" if name in _OPS and name not in "{}" else "cmd", name)

    def _escape(self) -> None:
        char = self.text[self.at + 1 : self.at + 2]
        self.at += 2
        if char == "\\":
            self._emit("op", "\\\\")
            if match := re.compile(r"\s*\[[\d.]+\s*(?:pt|em|ex|mm)\]").match(self.text, self.at):
                self.at = match.end()
        elif char in "{}":
            self._emit("cmd", char)
        elif char == "|":
            self._emit("op", "|")
        elif char == "%":
            self._emit("op", "%")
        elif char == "$":
            self._emit("op", "$dollar")
        elif char in "()[],;:! \n" or not char:
            self.spaced = True
        elif char in "&#_":
            self._emit("op", "&" if char == "&" else "_")
        else:
            raise ParseError(f"unknown command \\{char!r}")

    def _text(self, name: str) -> None:
        """The argument of `\\text` and its kind: words, numbers, a little punctuation."""
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1
        if self.text[self.at : self.at + 1] != "{":
            return  # old `\rm` style: what follows is read as mathematics
        depth, start = 1, self.at + 1
        end = start
        while end < len(self.text) and depth:
            if self.text[end] == "\\":
                end += 2
                continue
            depth += {"{": 1, "}": -1}.get(self.text[end], 0)
            end += 1
        if depth:
            raise ParseError("braces that do not match")
        content = self.text[start : end - 1]
        stripped = content.strip()
        self.spaced = self.spaced or content[:1].isspace()
        if (
            name in _ROMAN_MATH and re.fullmatch(r"[A-Za-z]|[a-z]{2,6}", stripped.strip("~ "))
        ) or not re.search(r"[^\W\d_]", re.sub(r"\\[A-Za-z]+", "", stripped)):
            kept_spaced = self.spaced
            self.at = start
            before = len(self.tokens)
            self._math(end - 1)
            if name in _ROMAN_MATH and len(self.tokens) == before + 1:
                token = self.tokens[-1]
                if token.kind == "run" and len(token.value) == 1 and token.value not in "eid":
                    # \mathrm{m} is a unit after a number, a letter elsewhere
                    self.tokens[-1] = Token("roman", token.value, kept_spaced)
        elif "\\" in stripped or "$" in stripped or "^" in stripped:
            self.at = start
            self._mixed(end - 1)
        else:
            self.at = start
            self._words(end - 1)
        self.at = end
        self.spaced = self.spaced or content[-1:].isspace()

    def _mixed(self, end: int) -> None:
        while self.at < end:
            match = _WORD.match(self.text, self.at, end)
            if match:
                self.at = match.end()
                self._word(match.group())
            else:
                stop = self.at + 1
                if self.text[self.at] == "\\":
                    command = _COMMAND.match(self.text, self.at)
                    stop = command.end() if command else self.at + 2
                self._math(min(stop, end))

    def _words(self, end: int) -> None:
        while self.at < end:
            if match := _WORD.match(self.text, self.at, end):
                self.at = match.end()
                self._word(match.group())
            else:
                number = _NUMBER.match(self.text, self.at, end)
                self._math(number.end() if number else self.at + 1)

    def _word(self, word: str) -> None:
        lower = word.lower()
        if lower in ("or", "and"):
            self._emit("op", "or" if lower == "or" else ",")
        else:
            self._emit("word", word)
